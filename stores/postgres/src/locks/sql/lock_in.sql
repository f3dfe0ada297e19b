-- Locks a key for the caller's own transaction, until its end: the transaction is the lock.
--   $1 key
-- Always returns one row: the fencing token if the transaction has the lock, and the row as it was before. Waits for no
-- lock. If it locked the row without acquiring the lock, the caller undoes that by a savepoint.
WITH free AS MATERIALIZED (
  SELECT l.key FROM {table} l
   WHERE l.key = $1 AND (l.holder = '' OR l.until <= clock_timestamp()) AND l.read_until <= clock_timestamp()
     FOR UPDATE OF l SKIP LOCKED
), taken AS (
  UPDATE {table} l SET
         holder = '', kind = '', kept = false, tokens = 1, until = clock_timestamp(), read_until = 'epoch',
         fence = greatest(l.fence + l.tokens, l.read_next, (extract(epoch FROM clock_timestamp()) * 1000000)::int8,
                          (SELECT max(f.fence) + 1 FROM {floor} f)),
         -- Ends the grants of earlier readers: none of them has this era.
         era = greatest(l.fence + l.tokens, l.read_next)
    FROM free WHERE l.key = free.key
  RETURNING l.fence
)
SELECT CASE WHEN taken.fence IS NOT NULL AND pg_try_advisory_xact_lock_shared({pinned}, hashtext($1)) IS NOT NULL
            THEN taken.fence END AS fence,
       l.key IS NOT NULL AS there,
       coalesce(l.holder <> '' AND l.until > clock_timestamp() OR l.read_until > clock_timestamp(), false) AS held,
       (extract(epoch FROM greatest(CASE WHEN l.holder <> '' THEN nullif(l.until, '{never}') END,
                                    nullif(l.read_until, 'epoch')) - clock_timestamp())
        * 1000000)::int8 AS remaining
  FROM (SELECT) AS always LEFT JOIN taken ON true LEFT JOIN {table} l ON l.key = $1
