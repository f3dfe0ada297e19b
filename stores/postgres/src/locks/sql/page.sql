-- The first and the last of the next keys with a prefix, held or not, for a list in pages. There are no more after them if there
-- are fewer than were asked for.
--   $1 prefix  $2 the last key of the page before, or ''  $3 how many keys
SELECT min(n.key) AS first, max(n.key) AS last, count(*) AS keys FROM (
  SELECT l.key FROM {table} l WHERE l.key >= $1::text AND l.key > $2::text ORDER BY l.key LIMIT $3::int8
) n WHERE left(n.key, length($1::text)) = $1::text
