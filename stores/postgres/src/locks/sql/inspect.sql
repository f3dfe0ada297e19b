-- The locks that are held, of the keys in a range; the writer of each lock precedes its readers. A lock that only transactions
-- hold has one row for each, without a kind and a remaining time.
--   $1 first key  $2 last key, which may be the same  $3 prefix of the keys
-- Each part has the range: it is read from the index there, and not from all that is held.
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now), open AS MATERIALIZED (
  SELECT l.key, l.holder, l.kind, l.kept, l.until, 1 AS amount FROM {table} l, clock
   WHERE l.key BETWEEN $1::text AND $2::text AND l.holder <> '' AND l.kind NOT IN ('permit', 'latch') AND l.until > clock.now
   UNION ALL
  SELECT r.key, r.holder, 'read', r.kept, r.until, 1 FROM {readers} r JOIN {table} l ON l.key = r.key AND l.era = r.era, clock
   WHERE r.key BETWEEN $1::text AND $2::text AND l.key BETWEEN $1::text AND $2::text AND r.until > clock.now
   UNION ALL
  SELECT p.key, p.holder, 'permit', p.kept, p.until, p.amount FROM {permits} p, clock
   WHERE p.key BETWEEN $1::text AND $2::text AND p.owned AND p.until > clock.now
), shown AS (
  SELECT o.key, o.holder, o.kind, o.kept, o.until, o.amount FROM open o
   UNION ALL
  SELECT p.key, coalesce('transaction of process ' || p.pid, 'prepared transaction'), '', false, NULL, 1 FROM {pins} p
   WHERE p.key BETWEEN $1::text AND $2::text AND NOT EXISTS (SELECT FROM open o WHERE o.key = p.key)
)
SELECT h.key, h.holder, h.kind, h.kept, h.amount,
       -- Nothing can be subtracted from infinity, which an operator may have entered.
       (extract(epoch FROM CASE h.until WHEN 'infinity' THEN '{never}' ELSE h.until END - clock.now) * 1000000)::int8
         AS remaining
  FROM clock, shown h
 WHERE left(h.key, length($3::text)) = $3::text
 ORDER BY h.kind = 'read'
