-- Acquires fair locks, each on its own, or keeps the positions of waiters.
--   $1 keys  $2 grant ids  $3 leases in µs  $4 numbers of tokens
--   $5 the server's time, in µs, after which the request is refused
--   $6 whether the request takes a position in the queue  $7 whether the waiter has asked before
-- Always returns one row for each key, as acquire.sql, and with a grant the next waiters of the same client. Waits for the
-- disk only if a lock was granted: a position that is lost in a crash is taken again by its waiter.
WITH asked AS MATERIALIZED (
  SELECT a.* FROM unnest($1::text[], $2::text[], $3::int8[], $4::int4[], $5::int8[], $6::bool[], $7::bool[])
         WITH ORDINALITY AS a(key, holder, lease, tokens, refuse_after, waits, asked, n)
   ORDER BY a.key
), found AS MATERIALIZED (
  SELECT a.n, f.*
    FROM asked a, LATERAL {fair}(a.key, a.holder, a.lease, a.tokens, a.waits, a.asked, a.refuse_after) f
), async AS MATERIALIZED (
  SELECT CASE WHEN NOT EXISTS (SELECT FROM found WHERE found.fence IS NOT NULL)
              THEN set_config('synchronous_commit', 'off', true) END AS done
)
SELECT f.fence, f.tokens, f.there, f.late, false AS open, f.held_as, f.held, false AS astray, f.remaining, f.now, f.behind,
       async.done IS NULL AS durable
  FROM found f CROSS JOIN async
 ORDER BY f.n
