-- Acquires locks, each on its own, that no reads are among: as acquire.sql, with less work for each lock.
--   $1 keys  $2 grant ids  $3 kinds  $4 leases in µs  $5 numbers of tokens
--   $6 the server's time, in µs, after which the request is refused
-- An array of a single element has the value for all.
SELECT * FROM {acquire_many}($1, $2, $3, $4, $5, $6)
