-- Lets the claim last.
--   $1 key  $2 token  $3 lease and $4 retention in µs
-- Always returns one row: whether the claim was extended, the record as it was before, and whether its lease was over then.
-- Waits for no lock.
WITH clock AS MATERIALIZED (
  SELECT clock_timestamp() AS now
), open AS MATERIALIZED (
  SELECT t.key FROM {table} t, clock
   WHERE t.key = $1 AND t.token = $2 AND t.version = 1 AND t.state = 'claimed' AND t.expires_at > clock.now
     FOR NO KEY UPDATE OF t SKIP LOCKED
), changed AS (
  UPDATE {table} t SET
         lease_until = clock.now + $3::int8 * interval '1 microsecond',
         expires_at = greatest(t.expires_at, clock.now + greatest($3::int8, $4::int8) * interval '1 microsecond')
    FROM open, clock WHERE t.key = open.key
  RETURNING t.key
)
SELECT EXISTS (SELECT FROM changed) AS changed, seen.version, seen.state, seen.token = $2 AS mine,
       coalesce(seen.lease_until <= clock.now, false) AS expired
  FROM clock LEFT JOIN {table} seen ON seen.key = $1 AND seen.expires_at > clock.now
