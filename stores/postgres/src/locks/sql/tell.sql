-- Notifies the waiters of a key. Commits that notify queue up; this one does not hold them up by writing to the disk.
--   $1 key
SELECT set_config('synchronous_commit', 'off', true) IS NULL AS off, pg_notify({channel}, $1::text) IS NULL AS told
