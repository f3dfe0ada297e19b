-- Tells those who wait for a record.
--   $1 channel  $2 key
-- Commits that notify stand in one line; this one does not hold it up by writing to the disk.
SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, $2)
