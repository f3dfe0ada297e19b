-- What became of a claim.
--   $1 key  $2 token
-- Always returns one row: the record, and `settled` with the result unless a transaction is changing the record.
WITH clock AS MATERIALIZED (
  SELECT clock_timestamp() AS now
), settled AS MATERIALIZED (
  SELECT t.version, t.state, t.response FROM {table} t, clock
   WHERE t.key = $1 AND t.token = $2 AND t.expires_at > clock.now
     FOR SHARE OF t SKIP LOCKED
)
SELECT settled.state IS NOT NULL AS settled, coalesce(settled.version, seen.version) AS version,
       coalesce(settled.state, seen.state) AS state, seen.token = $2 AS mine, settled.response
  FROM clock LEFT JOIN settled ON true
       LEFT JOIN {table} seen ON seen.key = $1 AND seen.expires_at > clock.now
