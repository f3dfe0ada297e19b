-- Removes rows of locks that were free for a minute, at most $1, and none that a transaction has locked. The greatest of
-- their tokens stays, so that those of the next rows are greater.
WITH alone AS MATERIALIZED (
  SELECT pg_try_advisory_xact_lock({class}, -1) AS here, set_config('synchronous_commit', 'off', true) AS async
), old AS MATERIALIZED (
  SELECT l.key, l.fence + l.tokens AS next FROM {table} l
   WHERE (SELECT alone.here AND alone.async IS NOT NULL FROM alone)
     AND l.until < (SELECT clock_timestamp() - interval '1 minute')
   LIMIT $1::int8
     FOR UPDATE OF l SKIP LOCKED
), kept AS (
  UPDATE {floor} f SET fence = greatest(f.fence, (SELECT max(old.next) FROM old)) WHERE EXISTS (SELECT FROM old)
), gone AS (
  DELETE FROM {table} l USING old WHERE l.key = old.key RETURNING l.key
)
SELECT count(*) AS gone FROM gone
