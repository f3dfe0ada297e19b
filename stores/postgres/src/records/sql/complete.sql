-- Stores the result.
--   $1 key  $2 token  $3 response  $4 retention in µs
-- Always returns one row: whether the result was stored, and the record as it was before. Waits for no lock.
WITH clock AS MATERIALIZED (
  SELECT clock_timestamp() AS now
), open AS MATERIALIZED (
  SELECT t.key FROM {table} t, clock
   WHERE t.key = $1 AND t.token = $2 AND t.version = 1 AND t.state = 'claimed' AND t.expires_at > clock.now
     FOR NO KEY UPDATE OF t SKIP LOCKED
), changed AS (
  UPDATE {table} t SET
         state = 'completed', response = $3, expires_at = clock.now + $4::int8 * interval '1 microsecond'
    FROM open, clock WHERE t.key = open.key
  RETURNING t.key
)
SELECT EXISTS (SELECT FROM changed) AS changed, seen.version, seen.state, seen.token = $2 AS mine
  FROM clock LEFT JOIN {table} seen ON seen.key = $1 AND seen.expires_at > clock.now
