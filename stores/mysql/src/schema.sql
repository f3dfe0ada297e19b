-- Locks of dlock. May be run again at any time, by any process.
CREATE TABLE IF NOT EXISTS {table} (
  k        VARBINARY(1024) NOT NULL PRIMARY KEY, -- the key, byte by byte: case, accents and spaces at the end count
  holder   VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '', -- id of the grant; '' when free
  kind     VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '',
  kept     TINYINT NOT NULL DEFAULT 0,  -- released, and taken until the end of its min_hold
  fence    BIGINT NOT NULL DEFAULT 0,   -- first fencing token of the grant
  tokens   INT NOT NULL DEFAULT 0,      -- how many tokens it has; the next grant begins behind them
  until_us BIGINT NOT NULL DEFAULT 0    -- end of the lease: microseconds since 1970, by the clock of this server
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
-- The greatest token of all rows that were removed.
CREATE TABLE IF NOT EXISTS {floor} (
  one   TINYINT NOT NULL PRIMARY KEY,
  fence BIGINT NOT NULL DEFAULT 0
) ENGINE = InnoDB;
INSERT IGNORE INTO {floor} (one) VALUES (1);
