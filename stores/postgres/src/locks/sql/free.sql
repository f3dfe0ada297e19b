-- Finds locks that have been available for a minute, at most $1, for the removal of their rows.
SELECT l.key FROM {table} l
 WHERE greatest(l.until, l.read_until) < (SELECT clock_timestamp() - interval '1 minute')
 LIMIT $1::int8
