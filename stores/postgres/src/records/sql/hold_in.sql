-- Locks the record for the owner's own transaction.
--   $1 key  $2 token
-- Returns one row, or none if the claim is lost.
SELECT key FROM {table}
 WHERE key = $1 AND token = $2 AND version = 1 AND expires_at > clock_timestamp() AND state = 'claimed'
   FOR NO KEY UPDATE
