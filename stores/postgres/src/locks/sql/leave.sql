-- Ends grants of readers, selected by id. Notifies the waiters, if any, when the lock becomes available to them, or much
-- earlier than they expect.
--   $1 keys  $2 grant ids  $3 how long to keep the key unavailable, in µs, or 0
--   $4 numbers of the advisory locks that show waiters  $5 whether notifications go through the server
-- Always returns one row for each key: whether the grant was ended, whether another transaction had locked its row, and
-- whether the grant existed then. Like the release of a plain lock it does not wait for the disk. It calls a function,
-- because the statements of that see what was committed before the row of the lock was locked; this statement would not.
WITH async AS MATERIALIZED (
  SELECT set_config('synchronous_commit', 'off', true) AS done
), asked AS MATERIALIZED (
  SELECT a.* FROM async,
         unnest($1::text[], $2::text[], $3::int8[], $4::int4[]) WITH ORDINALITY AS a(key, holder, keep, bucket, n)
   WHERE async.done IS NOT NULL
), found AS MATERIALIZED (
  SELECT a.n, a.key, a.bucket, f.* FROM asked a, LATERAL {leave}(a.key, a.holder, a.keep) f
)
SELECT f.ended, f.locked, f.held, (extract(epoch FROM f.seen) * 1000000)::int8 AS now,
       CASE WHEN $5::bool AND f.loud AND NOT pg_try_advisory_xact_lock({class}, f.bucket)
            THEN pg_notify({channel}, f.key) IS NULL END AS told
  FROM found f
 ORDER BY f.n
