-- Notifies the waiters of a key. Commits with notifications are serialized; this one does not block others by writing to
-- the disk.
--   $1 key
SELECT set_config('synchronous_commit', 'off', true) IS NULL AS off, pg_notify({channel}, $1::text) IS NULL AS told
