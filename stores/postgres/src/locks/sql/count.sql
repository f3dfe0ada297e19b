-- Runs an operation on a semaphore or latch, and notifies its waiters, if any.
--   $1 key  $2 'permit' or 'latch'  $3 the operation  $4 its id  $5 its number  $6 its flag
--   $7 how long it may arrive again, in µs  $8 the server's time, in µs, after which it is refused
--   $9 number of the advisory lock that shows waiters  $10 whether notifications go through the server
-- Always returns one row.
SELECT f.reply, f.number, f.in_use, f.late, f.held_as, f.locked, f.now,
       CASE WHEN $10::bool AND f.loud AND NOT pg_try_advisory_xact_lock({class}, $9::int4)
            THEN pg_notify({channel}, $1::text) IS NULL END AS told
  FROM {count}($1::text, $2::text, $3::text, $4::text, $5::int8, $6::bool, $7::int8, $8::int8) f
