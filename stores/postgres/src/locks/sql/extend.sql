-- Lets grants of readers last for their leases from now on. Each is named by its id; nothing is made and no other is touched.
--   $1 keys  $2 grant ids  $3 leases in µs
-- One row for each key, always: whether it was renewed, and whether it was there without that, as the lock's row is locked.
WITH asked AS MATERIALIZED (
  SELECT * FROM unnest($1::text[], $2::text[], $3::int8[]) WITH ORDINALITY AS a(key, holder, lease, n)
), found AS MATERIALIZED (
  SELECT a.n, f.* FROM asked a, LATERAL {extend}(a.key, a.holder, a.lease) f
)
SELECT f.renewed, f.held FROM found f ORDER BY f.n
