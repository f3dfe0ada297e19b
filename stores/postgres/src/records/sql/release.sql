-- Forgets the record, if nothing was done under this claim. Otherwise, and where it had been taken over, it becomes
-- an orphan at once instead: what was done is unknown, and stays so.
--   $1 key  $2 token  $3 whether nothing was done
-- One row, always: whether that was done, and the record as it was seen. It waits only for an insert
-- of the same key that is just being committed.
--
-- A trace is left for ten minutes, also where there was nothing: a claim of this token that is late (its answer was
-- given up, and this overtook it) finds it and does nothing.
WITH clock AS MATERIALIZED (
  SELECT clock_timestamp() AS now
), open AS MATERIALIZED (
  SELECT t.key FROM {table} t, clock
   WHERE t.key = $1 AND t.token = $2 AND t.version = 1 AND t.state = 'claimed' AND t.expires_at > clock.now
     FOR NO KEY UPDATE OF t SKIP LOCKED
), changed AS (
  UPDATE {table} t SET
         state = CASE WHEN $3::bool AND t.attempt = 1 THEN 'released' ELSE 'orphaned' END,
         lease_until = clock.now,
         -- The last slot of time stays known.
         expires_at = CASE WHEN $3::bool AND t.attempt = 1 AND {slot} IS NULL THEN clock.now + interval '10 minutes'
                           ELSE t.expires_at END
    FROM open, clock WHERE t.key = open.key
  RETURNING t.key
), trace AS (
  INSERT INTO {table} (key, version, state, token, fingerprint, attempt, fence, lease_until, expires_at)
  SELECT $1, 1, 'released', $2, '', 0, 0, clock.now, clock.now + interval '10 minutes'
    FROM clock WHERE NOT EXISTS (SELECT FROM {table} t WHERE t.key = $1)
  ON CONFLICT (key) DO NOTHING
)
SELECT EXISTS (SELECT FROM changed) AS changed, seen.version, seen.state, seen.token = $2 AS mine
  FROM clock LEFT JOIN {table} seen ON seen.key = $1 AND seen.expires_at > clock.now
