-- Holds a lock for the caller's own transaction: while that is open, no other client can acquire the lock, even if the
-- lease expires. Renewals and the release are not blocked, and for the grant of a reader neither are other readers.
--   $1 key  $2 id of the grant
-- Always returns one row: whether the transaction holds the lock, and whether the caller held it when the statement began.
-- Waits for no lock, unless its snapshot is old and dlock_lock_in has changed the row since. The row of a reader may be
-- older than the row of the lock, which is read again after it was locked: the era shows whether another holder came since.
WITH held AS MATERIALIZED (
  SELECT l.key FROM {table} l
   WHERE l.key = $1
     AND (l.holder = $2 AND NOT l.kept
          OR EXISTS (SELECT FROM {readers} r WHERE r.key = $1 AND r.holder = $2 AND r.era = l.era AND NOT r.kept))
     FOR KEY SHARE OF l SKIP LOCKED
)
SELECT CASE WHEN held.key IS NOT NULL THEN pg_try_advisory_xact_lock_shared({pinned}, hashtext($1)) IS NOT NULL
       ELSE false END AS held,
       EXISTS (SELECT FROM {table} l
                WHERE l.key = $1
                  AND (l.holder = $2 AND NOT l.kept
                       OR EXISTS (SELECT FROM {readers} r
                                   WHERE r.key = $1 AND r.holder = $2 AND r.era = l.era AND NOT r.kept))) AS there
  FROM (SELECT) AS always LEFT JOIN held ON true
