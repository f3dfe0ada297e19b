-- Removes rows of locks that have been available for a minute, at most $1, except those that a transaction has locked. The
-- greatest of their tokens is kept, so that the tokens of later rows are greater. Also removes as many rows of readers
-- whose leases expired a minute ago, of waiters that last asked a minute ago, and of operations on semaphores that are over.
WITH alone AS MATERIALIZED (
  SELECT pg_try_advisory_xact_lock({class}, -1) AS here, set_config('synchronous_commit', 'off', true) AS async
), old AS MATERIALIZED (
  SELECT l.key, greatest(l.fence + l.tokens, l.read_next) AS next FROM {table} l
   WHERE (SELECT alone.here AND alone.async IS NOT NULL FROM alone)
     AND greatest(l.until, l.read_until) < (SELECT clock_timestamp() - interval '1 minute')
   LIMIT $1::int8
     FOR UPDATE OF l SKIP LOCKED
), kept AS (
  UPDATE {floor} f SET fence = greatest(f.fence, (SELECT max(old.next) FROM old)) WHERE EXISTS (SELECT FROM old)
), gone AS (
  DELETE FROM {table} l USING old WHERE l.key = old.key RETURNING l.key
), past AS MATERIALIZED (
  SELECT r.key, r.holder FROM {readers} r
   WHERE (SELECT alone.here AND alone.async IS NOT NULL FROM alone)
     AND r.until < (SELECT clock_timestamp() - interval '1 minute')
   LIMIT $1::int8
     FOR UPDATE OF r SKIP LOCKED
), forgotten AS (
  DELETE FROM {readers} r USING past WHERE r.key = past.key AND r.holder = past.holder RETURNING r.key
), silent AS MATERIALIZED (
  SELECT w.key, w.holder FROM {waiters} w
   WHERE (SELECT alone.here AND alone.async IS NOT NULL FROM alone)
     AND w.until < (SELECT clock_timestamp() - interval '1 minute')
   LIMIT $1::int8
     FOR UPDATE OF w SKIP LOCKED
), left_out AS (
  DELETE FROM {waiters} w USING silent WHERE w.key = silent.key AND w.holder = silent.holder RETURNING w.key
), spent AS MATERIALIZED (
  SELECT p.key, p.holder FROM {permits} p
   WHERE (SELECT alone.here AND alone.async IS NOT NULL FROM alone)
     AND NOT p.owned AND p.until < (SELECT clock_timestamp() - interval '1 minute')
   LIMIT $1::int8
     FOR UPDATE OF p SKIP LOCKED
), settled AS (
  DELETE FROM {permits} p USING spent WHERE p.key = spent.key AND p.holder = spent.holder RETURNING p.key
), told AS MATERIALIZED (
  SELECT r.id FROM {replies} r
   WHERE (SELECT alone.here AND alone.async IS NOT NULL FROM alone) AND r.until < (SELECT clock_timestamp())
   LIMIT $1::int8
     FOR UPDATE OF r SKIP LOCKED
), dropped AS (
  DELETE FROM {replies} r USING told WHERE r.id = told.id RETURNING r.id
), unused AS MATERIALIZED (
  -- Semaphores without a total, whose last holders died.
  SELECT l.key FROM {table} l
   WHERE (SELECT alone.here AND alone.async IS NOT NULL FROM alone)
     AND l.kind = 'permit' AND l.holder <> '' AND l.number IS NULL
     AND NOT EXISTS (SELECT FROM {permits} p
                      WHERE p.key = l.key AND p.until > (SELECT clock_timestamp() - interval '1 minute'))
   LIMIT $1::int8
     FOR UPDATE OF l SKIP LOCKED
), ended AS (
  SELECT c.now FROM unused u, LATERAL {count}(u.key, 'permit', 'reap', '', 0, false, 0, 9223372036854775807) c
)
SELECT (SELECT count(*) FROM gone) AS gone, (SELECT count(*) FROM forgotten) AS readers,
       (SELECT count(*) FROM left_out) AS waiters,
       (SELECT count(*) FROM settled) + (SELECT count(*) FROM dropped) + (SELECT count(*) FROM ended) AS counters
