-- Notifies the waiters of a record.
--   $1 channel  $2 key
-- Commits with notifications are serialized; this one does not block others by writing to the disk.
SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, $2)
