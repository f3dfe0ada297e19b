-- Ends grants of fair locks and positions of their waiters, selected by id, and notifies the first waiter of a lock that
-- becomes available, if it listens.
--   $1 keys  $2 grant ids  $3 how long to keep the key unavailable, in µs, or 0
--   $4 numbers of the advisory locks that show waiters  $5 whether notifications go through the server
-- Always returns one row for each key: whether the grant was ended, whether another transaction had locked its row, and
-- whether the grant existed then. Like the release of a plain lock it does not wait for the disk.
WITH async AS MATERIALIZED (
  SELECT set_config('synchronous_commit', 'off', true) AS done
), asked AS MATERIALIZED (
  SELECT a.* FROM async,
         unnest($1::text[], $2::text[], $3::int8[], $4::int4[]) WITH ORDINALITY AS a(key, holder, keep, bucket, n)
   WHERE async.done IS NOT NULL
   ORDER BY a.key
), found AS MATERIALIZED (
  SELECT a.n, a.bucket, f.* FROM asked a, LATERAL {fair_release}(a.key, a.holder, a.keep) f
)
SELECT f.ended, f.locked, f.held, (extract(epoch FROM f.seen) * 1000000)::int8 AS now,
       CASE WHEN $5::bool AND f.told IS NOT NULL AND NOT pg_try_advisory_xact_lock({class}, f.bucket)
            THEN pg_notify({channel}, f.told) IS NULL END AS notified
  FROM found f
 ORDER BY f.n
