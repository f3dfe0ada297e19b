-- Acquires locks: each for itself, or all or none.
--   $1 keys  $2 grant ids  $3 kinds  $4 leases in µs  $5 numbers of tokens
--   $6 the server's time, in µs, after which the request is refused  $7 how many must be free, or 0: each for itself
-- One row for each key, always: fence and tokens if it was granted, whether its row was locked here, and the row as it was
-- seen before. It waits for no
-- lock: a row that another transaction has locked counts as taken. FOR UPDATE, and nothing less, is what respects
-- dlock_hold_in. Token and lease are drawn after the row was locked, by the clock as it is then.
WITH asked AS MATERIALIZED (
  SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::int8[], $5::int4[], $6::int8[])
           WITH ORDINALITY AS a(key, holder, kind, lease, tokens, refuse_after, n)
), free AS MATERIALIZED (
  SELECT l.key, a.n FROM {table} l JOIN asked a USING (key)
   WHERE l.holder = '' OR l.until <= clock_timestamp()
   ORDER BY l.key
     FOR UPDATE OF l SKIP LOCKED
), clock AS MATERIALIZED (
  SELECT now, (extract(epoch FROM now) * 1000000)::int8 AS micros, free
    FROM (SELECT clock_timestamp() AS now, count(*) AS free FROM free) AS after_locking
), taken AS (
  UPDATE {table} l SET
         holder = a.holder, kind = a.kind, kept = false, tokens = a.tokens,
         fence = greatest(l.fence + l.tokens, clock.micros, (SELECT max(f.fence) + 1 FROM {floor} f)),
         until = clock.now + a.lease * interval '1 microsecond'
    FROM free JOIN asked a USING (n), clock
   WHERE l.key = free.key AND clock.micros <= a.refuse_after AND ($7::int8 = 0 OR clock.free = $7::int8)
  RETURNING a.n, l.fence, l.tokens
)
SELECT taken.fence, taken.tokens, l.key IS NOT NULL AS there, clock.micros > a.refuse_after AS late,
       a.n IN (SELECT free.n FROM free) AS open,
       l.holder <> '' AND l.until > clock.now AS held,
       (extract(epoch FROM l.until - clock.now) * 1000000)::int8 AS remaining, clock.micros AS now
  FROM asked a CROSS JOIN clock LEFT JOIN taken USING (n) LEFT JOIN {table} l ON l.key = a.key
 ORDER BY a.n
