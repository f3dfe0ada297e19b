-- Claims a record, or reports what conflicts.
--   $1 key  $2 token  $3 fingerprint  $4 lease and $5 retention in µs  $6 whether to take over an orphan
--   $7 the server's time, in µs, after which the claim does nothing
-- Always returns one row: attempt and fence if the record was claimed; `free` if it could be claimed; whether it came too late;
-- the record as it was before; and the time. Waits only for an insert of the same key that is being committed: a row that is locked is about to be
-- completed by the owner's transaction, and is skipped.
WITH clock AS MATERIALIZED (
  SELECT now, (extract(epoch FROM now) * 1000000)::int8 AS us FROM (SELECT clock_timestamp() AS now) c
), seen AS MATERIALIZED (
  SELECT t.*, t.token = $2 AS mine, t.fingerprint = $3 AS same,
         t.expires_at > clock.now AND (t.version <> 1 OR t.state <> 'released' OR {slot} IS NOT NULL) AS kept,
         (extract(epoch FROM t.lease_until - clock.now) * 1000000)::int8 AS remaining
    FROM {table} t, clock WHERE t.key = $1
), free AS MATERIALIZED (
  SELECT t.key,
         t.expires_at <= clock.now OR t.state = 'released' AND {slot} IS NULL AS anew,
         t.expires_at > clock.now AND t.state = 'claimed' AND t.token = $2 AS mine
    FROM {table} t, clock
   WHERE t.key = $1 AND clock.us <= $7::int8 AND (
           t.expires_at <= clock.now
           OR t.version = 1 AND t.state = 'released' AND t.token <> $2 AND {slot} IS NULL
           OR t.version = 1 AND t.state = 'claimed' AND t.fingerprint = $3
              AND (t.token = $2 OR t.lease_until <= clock.now)
           OR t.version = 1 AND t.state = 'orphaned' AND t.fingerprint = $3 AND t.token <> $2)
     FOR NO KEY UPDATE OF t SKIP LOCKED
), changed AS (
  UPDATE {table} t SET
         version = 1, state = 'claimed', token = $2, fingerprint = $3, response = NULL,
         attempt = CASE WHEN free.anew THEN 1 WHEN free.mine THEN t.attempt ELSE t.attempt + 1 END,
         fence = CASE WHEN free.mine THEN t.fence
                      ELSE greatest(nextval({fence_literal}), clock.us, t.fence + 1) END,
         lease_until = greatest(clock.now + $4::int8 * interval '1 microsecond',
                                CASE WHEN free.mine THEN t.lease_until END),
         expires_at = greatest(clock.now + greatest($4::int8, $5::int8) * interval '1 microsecond',
                               CASE WHEN NOT free.anew THEN t.expires_at END)
    FROM free, clock
   WHERE t.key = free.key AND (free.anew OR free.mine OR $6::bool)
  RETURNING t.attempt, t.fence
), made AS (
  INSERT INTO {table} (key, version, state, token, fingerprint, attempt, fence, lease_until, expires_at)
  SELECT $1, 1, 'claimed', $2, $3, 1, greatest(nextval({fence_literal}), clock.us),
         clock.now + $4::int8 * interval '1 microsecond',
         clock.now + greatest($4::int8, $5::int8) * interval '1 microsecond'
    FROM clock WHERE NOT EXISTS (SELECT FROM seen) AND clock.us <= $7::int8
  ON CONFLICT (key) DO NOTHING
  RETURNING attempt, fence
)
SELECT coalesce(changed.attempt, made.attempt) AS attempt, coalesce(changed.fence, made.fence) AS fence,
       EXISTS (SELECT FROM free) AS free, clock.us, clock.us > $7::int8 AS late,
       seen.version, seen.state, seen.mine, seen.same, seen.kept, seen.remaining,
       seen.attempt AS seen_attempt, seen.fence AS seen_fence,
       CASE WHEN seen.version = 1 AND seen.kept AND seen.same AND seen.state = 'completed'
            THEN seen.response END AS response
  FROM clock LEFT JOIN seen ON true LEFT JOIN changed ON true LEFT JOIN made ON true
