-- Ends grants, selected by id, and notifies the waiters, if any: those for a plain lock, and the first one for a fair lock.
--   $1 keys  $2 grant ids  $3 how long to keep the key unavailable, in µs, or 0
--   $4 numbers of the advisory locks that show waiters  $5 whether notifications go through the server
-- An array of a single element has the value for all, except of keys, grants and buckets. A release that is lost in a crash
-- ends with its lease, so it does not wait for the disk; nor do the notifications, whose commits are serialized.
SELECT * FROM {release_many}($1, $2, $3, $4, $5)
