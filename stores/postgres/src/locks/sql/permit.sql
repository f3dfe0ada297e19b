-- Acquires permits, each request on its own, or keeps the positions of waiters.
--   $1 keys  $2 grant ids  $3 whether the permits have a holder  $4 leases in µs  $5 numbers of tokens
--   $6 the server's time, in µs, after which the request is refused
--   $7 how many permits  $8 totals, if none is set  $9 limits for the permits that are held, or NULL  $10 ids of waiters, or ''
--   $11 numbers of the advisory locks that show waiters  $12 whether notifications go through the server
-- Always returns one row for each key. Waits for the disk only if permits were granted, as fair.sql.
WITH asked AS MATERIALIZED (
  SELECT a.* FROM unnest($1::text[], $2::text[], $3::bool[], $4::int8[], $5::int4[], $6::int8[], $7::int4[], $8::int8[],
                         $9::int8[], $10::text[], $11::int4[])
         WITH ORDINALITY AS a(key, holder, owned, lease, tokens, refuse_after, amount, total, most, waiter, bucket, n)
   ORDER BY a.key
), found AS MATERIALIZED (
  SELECT a.n, a.key, a.bucket, f.*
    FROM asked a, LATERAL {permit}(a.key, a.holder, a.owned, a.lease, a.tokens, a.refuse_after, a.amount, a.total, a.most,
                                   a.waiter) f
), async AS MATERIALIZED (
  SELECT CASE WHEN NOT EXISTS (SELECT FROM found WHERE found.fence IS NOT NULL)
              THEN set_config('synchronous_commit', 'off', true) END AS done
)
SELECT f.fence, f.tokens, f.there, f.late, f.held_as, f.held, f.few, f.pinned, f.remaining, f.again, f.now,
       async.done IS NULL AS durable,
       CASE WHEN $12::bool AND f.loud AND NOT pg_try_advisory_xact_lock({class}, f.bucket)
            THEN pg_notify({channel}, f.key) IS NULL END AS told
  FROM found f CROSS JOIN async
 ORDER BY f.n
