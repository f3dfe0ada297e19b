-- Forgets the record, if no work was done under this claim. Otherwise, or if the claim was taken over from another owner,
-- the record becomes an orphan at once: what was done is unknown.
--   $1 key  $2 token  $3 whether no work was done
-- Always returns one row: whether the record was changed, `settled` unless another transaction is changing the record, and
-- the record as it was before. Waits only for an insert of the same key that is being committed.
--
-- A trace is kept for ten minutes, even if there was no record: a late claim with this token, which this release has
-- overtaken, finds the trace and does nothing. It replaces an expired record and the trace of another claim.
WITH clock AS MATERIALIZED (
  SELECT clock_timestamp() AS now
), found AS MATERIALIZED (
  -- Of any token: a claim that is not committed may be changing the record. But not the row of another's running lease,
  -- which its owner may be extending.
  SELECT t.key, t.token = $2 AND t.version = 1 AND t.state = 'claimed' AND t.expires_at > clock.now AS open,
         t.expires_at <= clock.now OR t.version = 1 AND t.state = 'released' AND {slot} IS NULL AS gone
    FROM {table} t, clock
   WHERE t.key = $1
     AND (t.token = $2 OR t.state <> 'claimed' OR t.lease_until <= clock.now OR t.expires_at <= clock.now)
     FOR NO KEY UPDATE OF t SKIP LOCKED
), changed AS (
  UPDATE {table} t SET
         state = CASE WHEN $3::bool AND t.attempt = 1 THEN 'released' ELSE 'orphaned' END,
         -- One in which no work was done is no attempt.
         attempt = CASE WHEN $3::bool AND t.attempt > 1 THEN t.attempt - 1 ELSE t.attempt END,
         lease_until = clock.now,
         -- Keeps the last time slot.
         expires_at = CASE WHEN $3::bool AND t.attempt = 1 AND {slot} IS NULL THEN clock.now + interval '10 minutes'
                           ELSE t.expires_at END
    FROM found, clock WHERE t.key = found.key AND found.open
  RETURNING t.key
), replaced AS (
  UPDATE {table} t SET
         version = 1, state = 'released', token = $2, fingerprint = '', response = NULL, attempt = 0,
         lease_until = clock.now, expires_at = clock.now + interval '10 minutes'
    FROM found, clock WHERE t.key = found.key AND found.gone
), trace AS (
  INSERT INTO {table} (key, version, state, token, fingerprint, attempt, fence, lease_until, expires_at)
  SELECT $1, 1, 'released', $2, '', 0, 0, clock.now, clock.now + interval '10 minutes'
    FROM clock WHERE NOT EXISTS (SELECT FROM {table} t WHERE t.key = $1)
  ON CONFLICT (key) DO NOTHING
  RETURNING key
)
SELECT EXISTS (SELECT FROM changed) AS changed,
       EXISTS (SELECT FROM found) OR EXISTS (SELECT FROM trace)
         -- No claim takes over a running lease.
         OR coalesce(seen.state = 'claimed' AND seen.token <> $2 AND seen.lease_until > clock.now, false) AS settled,
       seen.version, seen.state, seen.token = $2 AS mine
  FROM clock LEFT JOIN {table} seen ON seen.key = $1 AND seen.expires_at > clock.now
