-- Lets permits last for their leases from now on. Grants are selected by id.
--   $1 keys  $2 grant ids  $3 leases in µs
-- Always returns one row for each grant: whether it was renewed, and if not, whether it exists while another transaction has
-- locked its row.
WITH asked AS MATERIALIZED (
  SELECT * FROM unnest($1::text[], $2::text[], $3::int8[]) WITH ORDINALITY AS a(key, holder, lease, n)
), open AS MATERIALIZED (
  SELECT p.key, p.holder, a.n, a.lease FROM {permits} p JOIN asked a USING (key, holder)
   WHERE p.until > clock_timestamp() AND NOT p.kept
   ORDER BY p.key, p.holder
     FOR NO KEY UPDATE OF p SKIP LOCKED
), clock AS MATERIALIZED (
  SELECT clock_timestamp() AS now, count(*) AS open FROM open
), renewed AS (
  UPDATE {permits} p SET until = clock.now + open.lease * interval '1 microsecond'
    FROM open, clock
   WHERE p.key = open.key AND p.holder = open.holder AND p.until > clock.now AND NOT p.kept
  RETURNING open.n
), found AS MATERIALIZED (
  -- IN instead of a join: the planner expects one row of each, and would compare all pairs.
  SELECT a.*, a.n IN (SELECT renewed.n FROM renewed) AS renewed FROM asked a
)
SELECT f.renewed, coalesce(p.until > clock.now AND NOT p.kept, false) AS held
  FROM found f CROSS JOIN clock LEFT JOIN {permits} p ON p.key = f.key AND p.holder = f.holder
 ORDER BY f.n
