-- Ends semaphores without a total whose last holders died, at most $1.
WITH alone AS MATERIALIZED (
  SELECT pg_try_advisory_xact_lock({class}, -1) AS here, set_config('synchronous_commit', 'off', true) AS async
), unused AS MATERIALIZED (
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
SELECT count(*) AS gone FROM ended
