-- Holds a lock for the caller's own transaction: as long as that is open, nobody takes the lock over, even when its lease
-- is over. Renewals and the release go on beside it; where the grant is a reader's, so do other readers.
--   $1 key  $2 id of the grant
-- One row, always: whether the transaction holds it, and whether it was the holder's when the statement began. It waits
-- for no lock, unless its snapshot is old and dlock_lock_in changed the row since. A reader's row may be older than the lock's
-- row, which is read again after it was locked: then the era tells whether another holder came since.
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
