-- Makes rows of available locks, in the order of the keys, so that two statements with the same rows do not deadlock.
--   $1 keys
-- An available row need not survive a crash, so the statement does not wait for the disk. It waits for no transaction that
-- has locked an existing row: the conflict check would wait for one that has changed it.
WITH async AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true) AS done)
INSERT INTO {table} (key)
SELECT DISTINCT a.key FROM async, unnest($1::text[]) AS a(key)
 WHERE async.done IS NOT NULL AND NOT EXISTS (SELECT FROM {table} l WHERE l.key = a.key)
 ORDER BY a.key
ON CONFLICT (key) DO NOTHING
