-- Locks of dlock. Any process may run this at any time, also repeatedly.
CREATE TABLE IF NOT EXISTS {table} (
  key    text COLLATE "C" PRIMARY KEY,
  holder text NOT NULL DEFAULT '',          -- id of the grant; '' if the lock is available
  kind   text NOT NULL DEFAULT '',
  kept   bool NOT NULL DEFAULT false,       -- released, but unavailable until the end of its min_hold
  fence  int8 NOT NULL DEFAULT 0,           -- first fencing token of the grant
  tokens int4 NOT NULL DEFAULT 0,           -- number of tokens of the grant; the next grant starts after them
  until  timestamptz NOT NULL DEFAULT 'epoch', -- end of the lease, by the clock of this server
  era        int8 NOT NULL DEFAULT 0,       -- readers of another era are ignored: the lock had other holders since
  read_next  int8 NOT NULL DEFAULT 0,       -- greater than every token of a reader
  read_until timestamptz NOT NULL DEFAULT 'epoch' -- end of the last lease of its readers; 'epoch' without readers
) WITH (fillfactor = 50);                   -- the only index is the key, so every update stays in its page (HOT)
-- Tables from before there were readers. Checked first, because ALTER TABLE alone would wait for open transactions.
DO $dlock$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = '{table}'::regclass AND a.attname = 'read_until') THEN
    ALTER TABLE {table}
      ADD COLUMN IF NOT EXISTS era int8 NOT NULL DEFAULT 0,
      ADD COLUMN IF NOT EXISTS read_next int8 NOT NULL DEFAULT 0,
      ADD COLUMN IF NOT EXISTS read_until timestamptz NOT NULL DEFAULT 'epoch';
  END IF;
END $dlock$;
-- The readers of read-write locks. A transaction that changes one must have locked the row of its lock.
CREATE TABLE IF NOT EXISTS {readers} (
  key    text COLLATE "C" NOT NULL,
  holder text NOT NULL,                     -- id of the grant
  era    int8 NOT NULL,
  kept   bool NOT NULL DEFAULT false,
  fence  int8 NOT NULL,
  tokens int4 NOT NULL,
  until  timestamptz NOT NULL,
  PRIMARY KEY (key, holder)
) WITH (fillfactor = 50);
-- The greatest token of all removed rows.
CREATE TABLE IF NOT EXISTS {floor} (
  one   bool PRIMARY KEY DEFAULT true CHECK (one),
  fence int8 NOT NULL DEFAULT 0
);
INSERT INTO {floor} DEFAULT VALUES ON CONFLICT DO NOTHING;
-- Holds a lock in the caller's transaction: until its end no other client can acquire the lock, even if the lease expires.
-- If the token is not that of the holder, the call and the transaction fail with DLK01; or with 40001 if the transaction is
-- REPEATABLE READ or SERIALIZABLE and began before the acquire, which it may not see: then a new transaction can tell. If the
-- token leaves the process of its holder, the lock must not be handed off there (local_handoffs(0)).
CREATE OR REPLACE FUNCTION {hold_in}(lock_key text, token int8) RETURNS void LANGUAGE plpgsql AS $dlock$
BEGIN
  FOR look IN 1..8 LOOP
    PERFORM FROM {table} l
      WHERE l.key = lock_key
        AND (token BETWEEN l.fence AND l.fence + l.tokens - 1 AND l.holder <> '' AND NOT l.kept
             OR EXISTS (SELECT FROM {readers} r
                         WHERE r.key = lock_key AND token BETWEEN r.fence AND r.fence + r.tokens - 1
                           AND r.era = l.era AND NOT r.kept))
      FOR KEY SHARE OF l SKIP LOCKED;
    IF FOUND THEN
      PERFORM pg_try_advisory_xact_lock_shared({pinned}, hashtext(lock_key));
      RETURN;
    END IF;
    -- Another statement has locked the row briefly.
    PERFORM FROM {table} l
      WHERE l.key = lock_key
        AND (token BETWEEN l.fence AND l.fence + l.tokens - 1 AND l.holder <> '' AND NOT l.kept
             OR EXISTS (SELECT FROM {readers} r
                         WHERE r.key = lock_key AND token BETWEEN r.fence AND r.fence + r.tokens - 1
                           AND r.era = l.era AND NOT r.kept));
    EXIT WHEN NOT FOUND;
    PERFORM pg_sleep(0.001 * (1 << look));
  END LOOP;
  -- Tokens are times in µs, unless the clock was set back.
  IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
     AND token >= (extract(epoch FROM transaction_timestamp()) * 1000000)::int8 THEN
    RAISE EXCEPTION 'the transaction does not see that lock "%" is held: begin one after the acquire', lock_key
      USING ERRCODE = '40001';
  END IF;
  RAISE EXCEPTION 'lock "%" was lost: token % is not that of its holder', lock_key, token USING ERRCODE = 'DLK01';
END $dlock$;
-- Acquires a lock for the caller's transaction, and returns the fencing token, or NULL if the lock is held. The row must
-- exist: {make} creates it, in its own transaction.
CREATE OR REPLACE FUNCTION {lock_in}(lock_key text) RETURNS int8 LANGUAGE plpgsql AS $dlock$
DECLARE drawn int8;
BEGIN
  BEGIN
    PERFORM FROM {table} l
      WHERE l.key = lock_key AND (l.holder = '' OR l.until <= clock_timestamp()) AND l.read_until <= clock_timestamp()
      FOR UPDATE OF l SKIP LOCKED;
    IF NOT FOUND THEN
      -- Undoes the row lock if the lock was not acquired.
      RAISE EXCEPTION USING ERRCODE = 'DLK02';
    END IF;
    UPDATE {table} l SET
           holder = '', kind = '', kept = false, tokens = 1, until = clock_timestamp(), read_until = 'epoch',
           fence = greatest(l.fence + l.tokens, l.read_next, (extract(epoch FROM clock_timestamp()) * 1000000)::int8,
                            (SELECT max(f.fence) + 1 FROM {floor} f)),
           era = greatest(l.fence + l.tokens, l.read_next)
      WHERE l.key = lock_key RETURNING l.fence INTO drawn;
    PERFORM pg_try_advisory_xact_lock_shared({pinned}, hashtext(lock_key));
    RETURN drawn;
  EXCEPTION WHEN SQLSTATE 'DLK02' THEN
    PERFORM FROM {table} l WHERE l.key = lock_key;
    IF NOT FOUND THEN
      RAISE EXCEPTION 'lock "%" has no row: make it, in a transaction of its own', lock_key USING ERRCODE = 'DLK03';
    END IF;
    RETURN NULL;
  END;
END $dlock$;
-- Creates the row of an available lock. Never in a longer transaction, which would block other clients.
CREATE OR REPLACE FUNCTION {make}(lock_key text) RETURNS void LANGUAGE sql AS $dlock$
  INSERT INTO {table} (key) VALUES (lock_key) ON CONFLICT (key) DO NOTHING
$dlock$;
-- Ends the grant of a reader, for leave.sql. Its statements see everything that was committed before the row of the lock
-- was locked, because each statement of a volatile function has a new snapshot. Waits for no lock.
CREATE OR REPLACE FUNCTION {leave}(
  lock_key text, grant_id text, keep int8, OUT ended bool, OUT locked bool, OUT held bool, OUT loud bool, OUT seen timestamptz
) LANGUAGE plpgsql VOLATILE AS $dlock$
DECLARE
  lock_era int8;
  written timestamptz;
  known timestamptz;
  rest timestamptz;
BEGIN
  ended := false; locked := false; held := false; loud := false;
  seen := clock_timestamp();
  SELECT l.era, l.read_until, CASE WHEN l.holder <> '' THEN l.until END INTO lock_era, known, written
    FROM {table} l WHERE l.key = lock_key
     FOR NO KEY UPDATE OF l SKIP LOCKED;
  IF NOT FOUND THEN
    locked := EXISTS (SELECT FROM {table} l WHERE l.key = lock_key);
    held := EXISTS (SELECT FROM {table} l JOIN {readers} r ON r.key = l.key AND r.era = l.era
                     WHERE l.key = lock_key AND r.holder = grant_id AND r.until > seen);
    RETURN;
  END IF;
  seen := clock_timestamp();
  IF keep > 0 THEN
    UPDATE {readers} r SET until = least(r.until, seen + keep * interval '1 microsecond'), kept = true
     WHERE r.key = lock_key AND r.holder = grant_id AND r.era = lock_era AND r.until > seen;
  ELSE
    DELETE FROM {readers} r
     WHERE r.key = lock_key AND r.holder = grant_id AND r.era = lock_era AND r.until > seen;
  END IF;
  ended := FOUND;
  IF NOT ended THEN
    RETURN;
  END IF;
  SELECT max(r.until) INTO rest FROM {readers} r WHERE r.key = lock_key AND r.era = lock_era AND r.until > seen;
  -- Without readers the lock is available whatever the clock does; the other column says until when it was used.
  UPDATE {table} l SET read_until = coalesce(rest, 'epoch'),
                       until = CASE WHEN rest IS NULL AND l.holder = '' THEN seen ELSE l.until END
   WHERE l.key = lock_key;
  -- Waiters expect it at `known`, and an expired lease sends no notification.
  known := greatest(known, written);
  rest := greatest(rest, CASE WHEN written > seen THEN written END);
  loud := keep > 0 OR rest IS NULL OR rest - seen < (known - seen) / 2;
END $dlock$;
-- Extends the grant of a reader from now on, for extend.sql, in the same way.
CREATE OR REPLACE FUNCTION {extend}(lock_key text, grant_id text, lease int8, OUT renewed bool, OUT held bool)
LANGUAGE plpgsql VOLATILE AS $dlock$
DECLARE
  lock_era int8;
  known timestamptz;
  seen timestamptz;
  ends timestamptz;
BEGIN
  renewed := false; held := false;
  SELECT l.era, l.read_until INTO lock_era, known
    FROM {table} l WHERE l.key = lock_key
     FOR NO KEY UPDATE OF l SKIP LOCKED;
  IF NOT FOUND THEN
    held := EXISTS (SELECT FROM {table} l JOIN {readers} r ON r.key = l.key AND r.era = l.era
                     WHERE l.key = lock_key AND r.holder = grant_id AND r.until > clock_timestamp() AND NOT r.kept);
    RETURN;
  END IF;
  seen := clock_timestamp();
  ends := seen + lease * interval '1 microsecond';
  UPDATE {readers} r SET until = ends
   WHERE r.key = lock_key AND r.holder = grant_id AND r.era = lock_era AND r.until > seen AND NOT r.kept;
  renewed := FOUND;
  IF renewed AND ends < known THEN
    -- It may have been the last.
    SELECT max(r.until) INTO ends FROM {readers} r WHERE r.key = lock_key AND r.era = lock_era AND r.until > seen;
  END IF;
  IF renewed AND ends <> known THEN
    UPDATE {table} l SET read_until = ends WHERE l.key = lock_key;
  END IF;
END $dlock$;
-- The transactions that hold a lock by hold_in or lock_in: with pg_stat_activity, those to wait for or to end.
CREATE OR REPLACE VIEW {pins} AS
  SELECT l.key, p.pid FROM {table} l
    JOIN pg_locks p ON p.locktype = 'advisory' AND p.objsubid = 2 AND p.classid::int8 = {pinned_oid}
     AND p.objid::int8 = (hashtext(l.key)::int8 & 4294967295)
     AND p.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database());
