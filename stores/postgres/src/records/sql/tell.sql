-- Notifies the waiters of a record.
--   $1 channel  $2 key
-- Commits that notify queue up; this one does not hold it up by writing to the disk.
SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, $2)
