-- Locks of dlock. Any process may run this at any time, also repeatedly. The table of the locks comes last: where it is there,
-- so is the rest.
-- The greatest token of all removed rows.
CREATE TABLE IF NOT EXISTS {floor} (
  one   TINYINT NOT NULL PRIMARY KEY,
  fence BIGINT NOT NULL DEFAULT 0
) ENGINE = InnoDB;
INSERT IGNORE INTO {floor} (one) VALUES (1);
CREATE TABLE IF NOT EXISTS {table} (
  k        VARBINARY(1024) NOT NULL PRIMARY KEY, -- the key, compared byte by byte, including case, accents and trailing spaces
  holder   VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '', -- id of the grant; '' if available
  kind     VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '',
  kept     TINYINT NOT NULL DEFAULT 0,  -- released, but unavailable until the end of its min_hold
  fence    BIGINT NOT NULL DEFAULT 0,   -- first fencing token of the grant
  tokens   INT NOT NULL DEFAULT 0,      -- number of tokens of the grant; the next grant starts after them
  until_us BIGINT NOT NULL DEFAULT 0    -- end of the lease: microseconds since 1970, by the clock of this server
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
