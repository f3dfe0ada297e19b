-- Forgets the record, if no work was done under this claim. Otherwise, or if the claim was taken over from another owner,
-- the record becomes an orphan at once: what was done is unknown.
--   $1 key  $2 token  $3 whether no work was done
-- Always returns one row: whether the record was changed, and the record as it was before. Waits only for an insert of the
-- same key that is being committed.
--
-- A trace is kept for ten minutes, even if there was no record: a late claim with this token, which this release has
-- overtaken, finds the trace and does nothing.
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
         -- Keeps the last time slot.
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
