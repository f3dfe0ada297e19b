-- Removes rows of readers whose leases expired a minute ago, of waiters that last asked a minute ago, and of operations on
-- semaphores that are over; at most $1 of each, except those that a transaction has locked.
WITH alone AS MATERIALIZED (
  SELECT pg_try_advisory_xact_lock({class}, -1) AS here, set_config('synchronous_commit', 'off', true) AS async
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
)
SELECT greatest((SELECT count(*) FROM forgotten), (SELECT count(*) FROM left_out),
                (SELECT count(*) FROM settled), (SELECT count(*) FROM dropped)) AS gone
