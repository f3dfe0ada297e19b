-- Which processes of the server have a transaction that holds a lock.
--   $1 key
-- One row, always; NULL where none is known.
SELECT string_agg(DISTINCT p.pid::text, ', ') AS pids FROM {pins} p WHERE p.key = $1::text
