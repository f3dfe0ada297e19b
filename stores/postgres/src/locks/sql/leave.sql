-- Ends grants of readers, each of which is named by its id, and notifies the waiters where there are some and they can go
-- on, or wait for much less time than they know.
--   $1 keys  $2 grant ids  $3 how long to keep the key taken yet, in µs, or 0
--   $4 numbers of the advisory locks by which waiters are known  $5 whether notifications go through the server
-- One row for each key, always: whether the grant was ended, whether its row was locked by another transaction, and whether
-- the grant was there then. Like the release of a plain lock it does not wait for the disk. A function does it, whose
-- statements see what was committed before the lock's row was locked; this statement would not.
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
