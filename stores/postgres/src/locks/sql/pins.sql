-- The server processes with a transaction that holds a lock.
--   $1 key
-- Always returns one row, with NULL if none is known.
SELECT string_agg(DISTINCT p.pid::text, ', ') AS pids FROM {pins} p WHERE p.key = $1::text
