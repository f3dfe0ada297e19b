-- Removes a record, unless an attempt is in progress.
--   $1 key
-- Always returns one row: whether the record was removed, and the record as it was before. Waits for no lock.
WITH clock AS MATERIALIZED (
  SELECT clock_timestamp() AS now
), old AS MATERIALIZED (
  SELECT t.key FROM {table} t, clock
   WHERE t.key = $1 AND t.version = 1 AND (t.state <> 'claimed' OR t.lease_until <= clock.now)
         -- The trace of a released claim is not a record.
         AND NOT (t.state = 'released' AND {slot} IS NULL)
     FOR UPDATE OF t SKIP LOCKED
), gone AS (
  DELETE FROM {table} t USING old WHERE t.key = old.key RETURNING t.key
)
SELECT EXISTS (SELECT FROM gone) AS gone, seen.version, seen.state, seen.attempt, seen.fence,
       (extract(epoch FROM seen.lease_until - clock.now) * 1000000)::int8 AS remaining
  FROM clock LEFT JOIN {table} seen ON seen.key = $1 AND seen.expires_at > clock.now
