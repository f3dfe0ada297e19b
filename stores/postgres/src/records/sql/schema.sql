-- Records of dlock. Any process may run this at any time, also repeatedly.
CREATE TABLE IF NOT EXISTS {table} (
  key         text COLLATE "C" PRIMARY KEY,
  version     int4 NOT NULL,         -- of this format: 1
  state       text NOT NULL,         -- claimed, completed, orphaned (released, and what was done is unknown), released
  token       text NOT NULL,         -- of the claim
  fingerprint bytea NOT NULL,        -- of the request
  attempt     int4 NOT NULL,
  fence       int8 NOT NULL,
  lease_until timestamptz NOT NULL,  -- the end of the claim
  expires_at  timestamptz NOT NULL,  -- the end of the retention
  response    bytea                  -- the result of a completed record
);
-- Looked for first, because CREATE INDEX IF NOT EXISTS waits for open transactions, and all steps wait behind it.
DO $dlock$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
                  WHERE i.indrelid = '{table}'::regclass AND a.attname = 'expires_at') THEN
    CREATE INDEX IF NOT EXISTS {index} ON {table} (expires_at);
  END IF;
END $dlock$;
CREATE SEQUENCE IF NOT EXISTS {fence};
-- Fencing tokens are the clock's microseconds, so that those of a table that was lost, restored or taken over by a standby
-- are greater. Where the clock was set back, they count up from the record's last one, or from where the sequence is: it
-- begins at the clock, and is raised to it when this is run again.
SELECT setval({fence_literal}, greatest(last_value, (extract(epoch FROM clock_timestamp()) * 1000000)::int8))
  FROM {fence}
 WHERE (NOT is_called OR last_value < (extract(epoch FROM clock_timestamp()) * 1000000)::int8)
   AND has_sequence_privilege({fence_literal}, 'UPDATE');
