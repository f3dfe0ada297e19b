-- Ends grants, each of which is named by its id, and notifies the waiters where there are some.
--   $1 keys  $2 grant ids  $3 how long to keep the key taken yet, in µs, or 0
--   $4 numbers of the advisory locks by which waiters are known  $5 whether notifications go through the server
-- One row for each key, always: whether the grant was ended, and the row as it was seen before. A release that a crash
-- loses ends with its lease, so it does not wait for the disk; neither do the notifications, whose commits queue up.
WITH async AS MATERIALIZED (
  SELECT set_config('synchronous_commit', 'off', true) AS done
), asked AS MATERIALIZED (
  SELECT a.* FROM async,
         unnest($1::text[], $2::text[], $3::int8[], $4::int4[]) WITH ORDINALITY AS a(key, holder, keep, bucket, n)
   WHERE async.done IS NOT NULL
), open AS MATERIALIZED (
  SELECT l.key, a.n, a.holder, a.keep FROM {table} l JOIN asked a USING (key)
   ORDER BY l.key
     FOR NO KEY UPDATE OF l SKIP LOCKED
), clock AS MATERIALIZED (
  SELECT clock_timestamp() AS now, count(*) AS open FROM open
), ended AS (
  UPDATE {table} l SET
         holder = CASE WHEN open.keep > 0 THEN l.holder ELSE '' END, kept = open.keep > 0,
         until = CASE WHEN open.keep > 0 THEN least(l.until, clock.now + open.keep * interval '1 microsecond')
                      ELSE clock.now END
    FROM open, clock
   WHERE l.key = open.key AND l.holder = open.holder AND l.until > clock.now
  RETURNING open.n
), found AS MATERIALIZED (
  -- IN, and not a join: the planner takes either for one row, and would compare each with each.
  SELECT a.*, a.n IN (SELECT ended.n FROM ended) AS ended, a.n IN (SELECT open.n FROM open) AS open FROM asked a
)
SELECT f.ended, NOT f.open AND l.key IS NOT NULL AS locked,
       coalesce(l.holder = f.holder AND l.until > clock.now, false) AS held,
       (extract(epoch FROM clock.now) * 1000000)::int8 AS now,
       CASE WHEN $5::bool AND f.ended AND NOT pg_try_advisory_xact_lock({class}, f.bucket)
            THEN pg_notify({channel}, f.key) IS NULL END AS told
  FROM found f CROSS JOIN clock LEFT JOIN {table} l ON l.key = f.key
 ORDER BY f.n
