-- Holds permits for the caller's own transaction, as hold_in.sql holds a lock: while that is open, they are given to no other
-- client, even if the lease expires.
--   $1 key  $2 id of the grant
WITH held AS MATERIALIZED (
  SELECT p.key FROM {permits} p
   WHERE p.key = $1 AND p.holder = $2 AND NOT p.kept
     FOR KEY SHARE OF p SKIP LOCKED
)
SELECT CASE WHEN held.key IS NOT NULL THEN pg_try_advisory_xact_lock_shared({pinned}, hashtext($1)) IS NOT NULL
       ELSE false END AS held,
       EXISTS (SELECT FROM {permits} p WHERE p.key = $1 AND p.holder = $2 AND NOT p.kept) AS there
  FROM (SELECT) AS always LEFT JOIN held ON true
