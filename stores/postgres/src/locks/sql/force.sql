-- Ends all grants of a key, those of readers by a new era. FOR UPDATE: not while a transaction holds the lock by
-- dlock_hold_in.
--   $1 key
-- Always returns one row: whether there was a grant, whether a transaction has locked the row, and whether it is that of a
-- semaphore or latch, which stays.
WITH open AS MATERIALIZED (
  SELECT l.key, l.holder <> '' AND l.until > clock_timestamp() OR l.read_until > clock_timestamp() AS held FROM {table} l
   WHERE l.key = $1::text AND NOT (l.holder <> '' AND l.kind IN ('permit', 'latch'))
     FOR UPDATE OF l SKIP LOCKED
), ended AS (
  UPDATE {table} l SET
         holder = '', kind = '', kept = false, until = clock_timestamp(),
         read_until = 'epoch', era = greatest(l.fence + l.tokens, l.read_next)
    FROM open WHERE l.key = open.key
)
SELECT coalesce(open.held, false) AS ended, open.key IS NULL AND l.key IS NOT NULL AS locked,
       coalesce(l.holder <> '' AND l.kind IN ('permit', 'latch'), false) AS counts,
       (SELECT string_agg(p.pid::text, ', ') FROM {pins} p WHERE open.key IS NULL AND p.key = $1::text) AS pids
  FROM (SELECT $1::text AS key) AS a LEFT JOIN open USING (key) LEFT JOIN {table} l USING (key)
