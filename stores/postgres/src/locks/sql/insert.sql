-- Makes rows of free locks. In the order of the keys: two that make the same rows do not wait for each other in a circle.
--   $1 keys
-- Nothing of a free row needs to survive a crash, so it does not wait for the disk.
WITH async AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true) AS done)
INSERT INTO {table} (key)
SELECT DISTINCT a.key FROM async, unnest($1::text[]) AS a(key) WHERE async.done IS NOT NULL ORDER BY a.key
ON CONFLICT (key) DO NOTHING
