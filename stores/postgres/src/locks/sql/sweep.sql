-- Removes rows of locks that have been available for a minute, of those with the keys $1, except those that a transaction has
-- locked. The greatest of their tokens is kept, so that the tokens of later rows are greater.
WITH alone AS MATERIALIZED (
  SELECT pg_try_advisory_xact_lock({class}, -1) AS here, set_config('synchronous_commit', 'off', true) AS async
), old AS MATERIALIZED (
  SELECT l.key, greatest(l.fence + l.tokens, l.read_next) AS next FROM {table} l
   WHERE (SELECT alone.here AND alone.async IS NOT NULL FROM alone)
     AND l.key = ANY ($1::text[])
     AND greatest(l.until, l.read_until) < (SELECT clock_timestamp() - interval '1 minute')
     FOR UPDATE OF l SKIP LOCKED
), kept AS (
  UPDATE {floor} f SET fence = greatest(f.fence, (SELECT max(old.next) FROM old)) WHERE EXISTS (SELECT FROM old)
), gone AS (
  DELETE FROM {table} l USING old WHERE l.key = old.key RETURNING l.key
)
SELECT count(*) AS gone FROM gone
