-- Lets grants last for their leases from now on. Grants are selected by id.
--   $1 keys  $2 grant ids  $3 leases in µs
-- Always returns one row for each key: whether the grant was renewed, and if not, whether it exists while another
-- transaction has locked its row.
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
  -- IN instead of a join: the planner expects one row of each, and would compare all pairs.
  SELECT a.*, a.n IN (SELECT renewed.n FROM renewed) AS renewed FROM asked a
)
SELECT f.renewed, coalesce(l.holder = f.holder AND l.until > clock.now AND NOT l.kept, false) AS held
  FROM found f CROSS JOIN clock LEFT JOIN {table} l ON l.key = f.key
 ORDER BY f.n
