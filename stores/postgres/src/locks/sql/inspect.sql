-- The locks that are held, of one key or of all keys with a prefix; the writer of each lock precedes its readers. A lock that
-- only transactions hold has one row for each, without a kind and a remaining time.
--   $1 key, or NULL  $2 prefix
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now), held AS (
  SELECT l.key, l.holder, l.kind, l.kept, l.until, 1 AS amount FROM {table} l
   WHERE l.holder <> '' AND l.kind NOT IN ('permit', 'latch')
   UNION ALL
  SELECT r.key, r.holder, 'read', r.kept, r.until, 1 FROM {readers} r JOIN {table} l ON l.key = r.key AND l.era = r.era
   UNION ALL
  SELECT p.key, p.holder, 'permit', p.kept, p.until, p.amount FROM {permits} p WHERE p.owned
), open AS NOT MATERIALIZED (
  SELECT h.key, h.holder, h.kind, h.kept, h.until, h.amount FROM held h, clock WHERE h.until > clock.now
), shown AS (
  SELECT o.key, o.holder, o.kind, o.kept, o.until, o.amount FROM open o
   UNION ALL
  SELECT p.key, coalesce('transaction of process ' || p.pid, 'prepared transaction'), '', false, NULL, 1 FROM {pins} p
   WHERE NOT EXISTS (SELECT FROM open o WHERE o.key = p.key)
)
SELECT h.key, h.holder, h.kind, h.kept, (extract(epoch FROM h.until - clock.now) * 1000000)::int8 AS remaining, h.amount
  FROM clock, shown h
 WHERE ($1::text IS NULL OR h.key = $1::text) AND left(h.key, length($2::text)) = $2::text
 ORDER BY h.kind = 'read'
