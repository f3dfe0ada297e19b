-- Releases permits and positions of their waiters, selected by id, and notifies the waiters of the semaphore, if any.
--   $1 keys  $2 grant ids  $3 how long to keep the permits unavailable, in µs, or 0
--   $4 numbers of the advisory locks that show waiters  $5 whether notifications go through the server
-- Always returns one row for each key: whether the grant was ended, whether another transaction had locked the row of the
-- semaphore, and whether the grant exists. Like the release of a plain lock it does not wait for the disk, unless permits
-- without an owner come back.
WITH async AS MATERIALIZED (
  SELECT set_config('synchronous_commit', 'off', true) AS done
), asked AS MATERIALIZED (
  SELECT a.* FROM async,
         unnest($1::text[], $2::text[], $3::int8[], $4::int4[]) WITH ORDINALITY AS a(key, holder, keep, bucket, n)
   WHERE async.done IS NOT NULL
   ORDER BY a.key
), found AS MATERIALIZED (
  SELECT a.n, a.key, a.bucket, f.* FROM asked a, LATERAL {permit_release}(a.key, a.holder, a.keep) f
)
SELECT f.ended, f.locked, f.held, (extract(epoch FROM f.seen) * 1000000)::int8 AS now,
       CASE WHEN $5::bool AND f.loud AND NOT pg_try_advisory_xact_lock({class}, f.bucket)
            THEN pg_notify({channel}, f.key) IS NULL END AS told
  FROM found f
 ORDER BY f.n
