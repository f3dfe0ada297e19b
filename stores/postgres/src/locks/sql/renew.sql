-- Lets grants last for their leases from now on. Each is named by its id; nothing is made and no other is touched.
--   $1 keys  $2 grant ids  $3 leases in µs
-- One row for each key, always: whether it was renewed, and whether it was there without that, as its row is locked.
WITH asked AS MATERIALIZED (
  SELECT * FROM unnest($1::text[], $2::text[], $3::int8[]) WITH ORDINALITY AS a(key, holder, lease, n)
), open AS MATERIALIZED (
  SELECT l.key, a.n, a.holder, a.lease FROM {table} l JOIN asked a USING (key, holder)
   WHERE l.until > clock_timestamp() AND NOT l.kept
   ORDER BY l.key
     FOR NO KEY UPDATE OF l SKIP LOCKED
), clock AS MATERIALIZED (
  SELECT clock_timestamp() AS now, count(*) AS open FROM open
), renewed AS (
  UPDATE {table} l SET until = clock.now + open.lease * interval '1 microsecond'
    FROM open, clock
   WHERE l.key = open.key AND l.holder = open.holder AND l.until > clock.now AND NOT l.kept
  RETURNING open.n
), found AS MATERIALIZED (
  -- IN, and not a join: the planner takes either for one row, and would compare each with each.
  SELECT a.*, a.n IN (SELECT renewed.n FROM renewed) AS renewed FROM asked a
)
SELECT f.renewed, coalesce(l.holder = f.holder AND l.until > clock.now AND NOT l.kept, false) AS held
  FROM found f CROSS JOIN clock LEFT JOIN {table} l ON l.key = f.key
 ORDER BY f.n
