-- The locks that are held: of one key, or of all that begin with a prefix.
--   $1 key, or NULL  $2 prefix
SELECT l.key, l.holder, l.kind, l.kept,
       (extract(epoch FROM l.until - clock.now) * 1000000)::int8 AS remaining
  FROM (SELECT clock_timestamp() AS now) AS clock, {table} l
 WHERE l.holder <> '' AND l.until > clock.now
   AND ($1::text IS NULL OR l.key = $1::text) AND left(l.key, length($2::text)) = $2::text
