-- Reads a record.
--   $1 key  $2 whether to include the result
-- Always returns one row: the time, and the record.
WITH clock AS MATERIALIZED (
  SELECT clock_timestamp() AS now
)
SELECT (extract(epoch FROM clock.now) * 1000000)::int8 AS us,
       seen.version, seen.state, seen.attempt, seen.fence, seen.fingerprint,
       (extract(epoch FROM seen.lease_until - clock.now) * 1000000)::int8 AS remaining,
       (extract(epoch FROM seen.expires_at - clock.now) * 1000000)::int8 AS expires_in,
       octet_length(seen.response)::int8 AS size,
       CASE WHEN $2::bool THEN seen.response END AS response
  FROM clock LEFT JOIN {table} seen ON seen.key = $1 AND seen.expires_at > clock.now
