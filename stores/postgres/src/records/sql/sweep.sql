-- Removes expired records, at most $1, except those that a transaction is changing.
WITH old AS MATERIALIZED (
  SELECT t.key FROM {table} t
   WHERE t.expires_at <= (SELECT clock_timestamp()) -- as a subquery, for the index
   ORDER BY t.expires_at LIMIT $1::int8
     FOR UPDATE SKIP LOCKED
), gone AS (
  DELETE FROM {table} t USING old WHERE t.key = old.key RETURNING t.key
)
SELECT count(*) AS gone FROM gone
