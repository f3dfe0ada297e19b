-- Stores the result in the owner's own transaction; waits while the claim is being extended.
--   $1 key  $2 token  $3 response  $4 retention in µs
-- Changes one row, or none if the claim is lost.
UPDATE {table} SET
       state = 'completed', response = $3, expires_at = clock_timestamp() + $4::int8 * interval '1 microsecond'
 WHERE key = $1 AND token = $2 AND version = 1 AND expires_at > clock_timestamp()
   AND (state = 'claimed' OR state = 'completed' AND response = $3)
