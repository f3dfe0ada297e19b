-- Records of dlock. May be run again at any time, by any process.
CREATE TABLE IF NOT EXISTS {table} (
  key         text COLLATE "C" PRIMARY KEY,
  version     int4 NOT NULL,         -- of this format: 1
  state       text NOT NULL,         -- claimed, completed, orphaned (released, and what was done is unknown), released
  token       text NOT NULL,         -- of the claim
  fingerprint bytea NOT NULL,        -- of what was asked
  attempt     int4 NOT NULL,
  fence       int8 NOT NULL,
  lease_until timestamptz NOT NULL,  -- the end of the claim
  expires_at  timestamptz NOT NULL,  -- from then on it is forgotten
  response    bytea                  -- the result, once it is completed
);
CREATE INDEX IF NOT EXISTS {index} ON {table} (expires_at);
CREATE SEQUENCE IF NOT EXISTS {fence};
-- Fencing tokens grow by one and begin at the clock's microseconds, so that those of a table that was lost and
-- made anew are greater still.
SELECT setval({fence_literal}, greatest(last_value, (extract(epoch FROM clock_timestamp()) * 1000000)::int8))
  FROM {fence} WHERE NOT is_called;
