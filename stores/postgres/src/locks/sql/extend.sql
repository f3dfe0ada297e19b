-- Lets grants of readers last for their leases from now on. Grants are selected by id.
--   $1 keys  $2 grant ids  $3 leases in µs
-- Always returns one row for each key: whether the grant was renewed, and if not, whether it exists while the row of the
-- lock is locked by another transaction.
WITH asked AS MATERIALIZED (
  SELECT * FROM unnest($1::text[], $2::text[], $3::int8[]) WITH ORDINALITY AS a(key, holder, lease, n)
), found AS MATERIALIZED (
  SELECT a.n, f.* FROM asked a, LATERAL {extend}(a.key, a.holder, a.lease) f
)
SELECT f.renewed, f.held FROM found f ORDER BY f.n
