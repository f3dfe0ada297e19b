-- Acquires locks, each on its own, that no reads are among: as acquire.sql, with less work for each lock.
--   $1 keys  $2 grant ids  $3 kinds  $4 leases in µs  $5 numbers of tokens
--   $6 the server's time, in µs, after which the request is refused
-- Always returns one row for each key, as acquire.sql.
WITH asked AS MATERIALIZED (
  -- Subqueries hide the number of keys from the planner, which would plan anew for each execution.
  SELECT a.* FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::text[]), (SELECT $4::int8[]),
                         (SELECT $5::int4[]), (SELECT $6::int8[]))
                  WITH ORDINALITY AS a(key, holder, kind, lease, tokens, refuse_after, n)
), free AS MATERIALIZED (
  SELECT a.* FROM {table} l JOIN asked a USING (key)
   WHERE (l.holder = '' OR l.until <= clock_timestamp()) AND l.read_until <= clock_timestamp()
     FOR UPDATE OF l SKIP LOCKED
), clock AS MATERIALIZED (
  SELECT now, (extract(epoch FROM now) * 1000000)::int8 AS micros, (SELECT max(f.fence) + 1 FROM {floor} f) AS floor
    FROM (SELECT clock_timestamp() AS now, count(*) FROM free) AS after_locking
), taken AS (
  UPDATE {table} l SET
         holder = f.holder, kind = f.kind, kept = false, tokens = f.tokens, read_until = 'epoch',
         until = clock.now + f.lease * interval '1 microsecond',
         fence = greatest(l.fence + l.tokens, l.read_next, clock.micros, clock.floor),
         era = greatest(l.fence + l.tokens, l.read_next, clock.micros, clock.floor)
    FROM free f, clock
   WHERE l.key = f.key AND clock.micros <= f.refuse_after
  RETURNING f.n, l.fence, l.tokens
)
SELECT taken.fence, taken.tokens, taken.n IS NOT NULL OR was.key IS NOT NULL AS there,
       clock.micros > a.refuse_after AS late, false AS open, was.kind AS held_as, was.ends > clock.now AS held,
       false AS astray, (extract(epoch FROM was.ends - clock.now) * 1000000)::int8 AS remaining, clock.micros AS now
  FROM asked a CROSS JOIN clock LEFT JOIN taken USING (n)
       LEFT JOIN LATERAL (
         SELECT l.key, l.kind, greatest(CASE WHEN l.holder <> '' THEN l.until END, l.read_until) AS ends
           FROM {table} l WHERE l.key = a.key AND taken.n IS NULL
       ) was ON true
 ORDER BY a.n
