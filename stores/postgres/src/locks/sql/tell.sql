-- Notifies the waiters of a key: those for a plain lock, and the first one for a fair lock. Commits with notifications are
-- serialized; this one does not block others by writing to the disk.
--   $1 key
SELECT set_config('synchronous_commit', 'off', true) IS NULL AS off,
       pg_notify({channel}, $1::text || coalesce(chr(1) || first.holder, '')) IS NULL AS told
  FROM {first}($1::text, '') first
