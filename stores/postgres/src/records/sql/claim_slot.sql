-- Claims a record for a time slot, or reports what conflicts.
--   $1 key  $2 token  $3 lease and $4 retention in µs  $5 whether to take over an orphan of the same slot
--   $6 period in µs, or 0  $7 slot in µs since the epoch, or 0 for the nearest  $8 how far ahead a slot may be, in µs
--   $9 the server's time, in µs, after which the claim does nothing
-- Always returns one row: attempt, fence and slot if the record was claimed; `free` if it could be claimed; whether it came
-- too late; the record as it was before; and the time. The slot of a record is in its fingerprint: `slot `, 16 digits, spaces. Waits like
-- claim.sql.
WITH clock AS MATERIALIZED (
  SELECT now, (extract(epoch FROM now) * 1000000)::int8 AS us FROM (SELECT clock_timestamp() AS now) c
), near AS MATERIALIZED (
  SELECT now, us, coalesce(us + $6::int8 / 2 - (us + $6::int8 / 2) % nullif($6::int8, 0), us) AS nearest FROM clock
), asked AS MATERIALIZED (
  SELECT now, us, slot, latest,
         -- From the beginning of the slot on, which may be still to come.
         now + (greatest($3::int8, $4::int8) + greatest(slot - us, 0)) * interval '1 microsecond' AS until
    FROM (SELECT now, us, CASE WHEN $7::int8 > 0 THEN $7::int8 ELSE nearest END AS slot, nearest + $8::int8 AS latest
            FROM near) s
), seen AS MATERIALIZED (
  SELECT t.*, t.token = $2 AS mine,
         t.expires_at > asked.now AND (t.version <> 1 OR t.state <> 'released' OR {slot} IS NOT NULL) AS kept,
         (extract(epoch FROM t.lease_until - asked.now) * 1000000)::int8 AS remaining, {slot} AS last
    FROM {table} t, asked WHERE t.key = $1
), free AS MATERIALIZED (
  SELECT t.key, {slot} AS last,
         t.expires_at <= asked.now OR t.state = 'released' AND {slot} IS NULL AS anew,
         t.expires_at > asked.now AND t.state = 'claimed' AND t.token = $2 AS mine,
         t.state = 'released' OR coalesce({slot}, 0) < asked.slot AS first
    FROM {table} t, asked
   WHERE t.key = $1 AND asked.us <= $9::int8 AND (
           t.version = 1 AND t.state = 'claimed' AND t.token = $2 AND {slot} IS NOT NULL AND t.expires_at > asked.now
           OR asked.slot <= asked.latest AND asked.us - asked.slot <= $4::int8 AND (
                t.expires_at <= asked.now
                OR t.version = 1 AND t.token <> $2 AND (
                     t.state = 'released' AND {slot} IS NULL
                     OR {slot} < asked.slot AND (t.state <> 'claimed' OR t.lease_until <= asked.now)
                     OR {slot} = asked.slot
                        AND (t.state IN ('released', 'orphaned') OR t.state = 'claimed' AND t.lease_until <= asked.now))))
     FOR NO KEY UPDATE OF t SKIP LOCKED
), changed AS (
  UPDATE {table} t SET
         version = 1, state = 'claimed', token = $2, response = NULL,
         fingerprint = CASE WHEN free.mine THEN t.fingerprint
                            ELSE decode('slot ' || lpad(asked.slot::text, 16, '0') || repeat(' ', 11), 'escape') END,
         attempt = CASE WHEN free.mine THEN t.attempt WHEN free.anew OR free.first THEN 1 ELSE t.attempt + 1 END,
         fence = CASE WHEN free.mine THEN t.fence
                      ELSE greatest(nextval({fence_literal}), asked.us, t.fence + 1) END,
         lease_until = greatest(asked.now + $3::int8 * interval '1 microsecond',
                                CASE WHEN free.mine THEN t.lease_until END),
         expires_at = greatest(asked.until, CASE WHEN NOT free.anew THEN t.expires_at END)
    FROM free, asked
   WHERE t.key = free.key AND (free.anew OR free.mine OR free.first OR $5::bool)
  RETURNING t.attempt, t.fence, CASE WHEN free.mine THEN free.last ELSE asked.slot END AS slot
), made AS (
  INSERT INTO {table} (key, version, state, token, fingerprint, attempt, fence, lease_until, expires_at)
  SELECT $1, 1, 'claimed', $2, decode('slot ' || lpad(slot::text, 16, '0') || repeat(' ', 11), 'escape'),
         1, greatest(nextval({fence_literal}), us), now + $3::int8 * interval '1 microsecond',
         until
    FROM asked WHERE NOT EXISTS (SELECT FROM seen) AND slot <= latest AND us - slot <= $4::int8 AND us <= $9::int8
  ON CONFLICT (key) DO NOTHING
  RETURNING attempt, fence
)
SELECT coalesce(changed.attempt, made.attempt) AS attempt, coalesce(changed.fence, made.fence) AS fence,
       EXISTS (SELECT FROM free) AS free, asked.us > $9::int8 AS late,
       asked.us, coalesce(changed.slot, asked.slot) AS slot, asked.latest, asked.us - asked.slot > $4::int8 AS old,
       seen.version, seen.state, seen.mine, seen.kept, seen.remaining, seen.last,
       seen.attempt AS seen_attempt, seen.fence AS seen_fence,
       CASE WHEN seen.version = 1 AND seen.kept AND seen.last = asked.slot AND seen.state = 'completed'
            THEN seen.response END AS response
  FROM asked LEFT JOIN seen ON true LEFT JOIN changed ON true LEFT JOIN made ON true
