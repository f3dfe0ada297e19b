-- Ends grants, selected by id, and notifies the waiters, if any: those for a plain lock, and the first one for a fair lock.
--   $1 keys  $2 grant ids  $3 how long to keep the key unavailable, in µs, or 0
--   $4 numbers of the advisory locks that show waiters  $5 whether notifications go through the server
-- Always returns one row for each key: whether the grant was ended, and otherwise the row as it was before. A release that is
-- lost in a crash ends with its lease, so it does not wait for the disk; nor do the notifications, whose commits are
-- serialized.
WITH async AS MATERIALIZED (
  SELECT set_config('synchronous_commit', 'off', true) AS done
), asked AS MATERIALIZED (
  -- Subqueries, as in plain.sql.
  SELECT a.* FROM async, unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int8[]), (SELECT $4::int4[]))
                         WITH ORDINALITY AS a(key, holder, keep, bucket, n)
   WHERE async.done IS NOT NULL
), open AS MATERIALIZED (
  SELECT a.* FROM {table} l JOIN asked a USING (key)
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
)
SELECT ended.n IS NOT NULL AS ended, was.key IS NOT NULL AND a.n NOT IN (SELECT open.n FROM open) AS locked,
       coalesce(was.holder = a.holder AND was.until > clock.now, false) AS held,
       (extract(epoch FROM clock.now) * 1000000)::int8 AS now,
       CASE WHEN $5::bool AND ended.n IS NOT NULL AND NOT pg_try_advisory_xact_lock({class}, a.bucket)
            THEN pg_notify({channel}, a.key || coalesce(chr(1) || (SELECT first.holder FROM {first}(a.key, '') first), ''))
                 IS NULL END AS told
  FROM asked a CROSS JOIN clock LEFT JOIN ended USING (n)
       LEFT JOIN LATERAL (
         SELECT l.key, l.holder, l.until FROM {table} l WHERE l.key = a.key AND ended.n IS NULL
       ) was ON true
 ORDER BY a.n
