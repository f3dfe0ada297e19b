-- The server processes with transactions that hold locks.
--   $1 keys
-- Returns one row for each key that a known process holds.
SELECT p.key, string_agg(DISTINCT p.pid::text, ', ') AS pids FROM {pins} p WHERE p.key = ANY ($1::text[]) GROUP BY p.key
