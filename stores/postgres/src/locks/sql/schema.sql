-- Locks of dlock. May be run again at any time, by any process.
CREATE TABLE IF NOT EXISTS {table} (
  key    text COLLATE "C" PRIMARY KEY,
  holder text NOT NULL DEFAULT '',          -- id of the grant; '' when the lock is free
  kind   text NOT NULL DEFAULT '',
  kept   bool NOT NULL DEFAULT false,       -- released, and taken until the end of its min_hold
  fence  int8 NOT NULL DEFAULT 0,           -- first fencing token of the grant
  tokens int4 NOT NULL DEFAULT 0,           -- how many tokens it has; the next grant begins behind them
  until  timestamptz NOT NULL DEFAULT 'epoch' -- end of the lease, by the clock of this server
) WITH (fillfactor = 50);                   -- no index but the key: every update stays in its page (HOT)
-- The greatest token of all rows that were removed.
CREATE TABLE IF NOT EXISTS {floor} (
  one   bool PRIMARY KEY DEFAULT true CHECK (one),
  fence int8 NOT NULL DEFAULT 0
);
INSERT INTO {floor} DEFAULT VALUES ON CONFLICT DO NOTHING;
-- Holds a lock in the caller's transaction: until that ends nobody takes the lock over, whatever becomes of its lease.
-- It fails, and so does the transaction, where the token is not that of the holder any more. Of a token that leaves the
-- process of its holder: the lock must not be handed off there (local_handoffs(0)).
CREATE OR REPLACE FUNCTION {hold_in}(lock_key text, token int8) RETURNS void LANGUAGE plpgsql AS $dlock$
BEGIN
  FOR look IN 1..8 LOOP
    PERFORM FROM {table} l
      WHERE l.key = lock_key AND token BETWEEN l.fence AND l.fence + l.tokens - 1 AND l.holder <> '' AND NOT l.kept
      FOR KEY SHARE OF l SKIP LOCKED;
    IF FOUND THEN
      PERFORM pg_try_advisory_xact_lock_shared({pinned}, hashtext(lock_key));
      RETURN;
    END IF;
    -- A row that another statement is just looking at.
    PERFORM FROM {table} l
      WHERE l.key = lock_key AND token BETWEEN l.fence AND l.fence + l.tokens - 1 AND l.holder <> '' AND NOT l.kept;
    EXIT WHEN NOT FOUND;
    PERFORM pg_sleep(0.001 * (1 << look));
  END LOOP;
  RAISE EXCEPTION 'lock "%" was lost: token % is not that of its holder', lock_key, token USING ERRCODE = 'DLK01';
END $dlock$;
-- Locks a key for the caller's transaction, and returns the fencing token; NULL where the lock is taken. The row has to be
-- there: {make} makes it, in a transaction of its own.
CREATE OR REPLACE FUNCTION {lock_in}(lock_key text) RETURNS int8 LANGUAGE plpgsql AS $dlock$
DECLARE drawn int8;
BEGIN
  BEGIN
    PERFORM FROM {table} l
      WHERE l.key = lock_key AND (l.holder = '' OR l.until <= clock_timestamp())
      FOR UPDATE OF l SKIP LOCKED;
    IF NOT FOUND THEN
      -- Undoes what it locked without having the lock.
      RAISE EXCEPTION USING ERRCODE = 'DLK02';
    END IF;
    UPDATE {table} l SET
           holder = '', kind = '', kept = false, tokens = 1, until = clock_timestamp(),
           fence = greatest(l.fence + l.tokens, (extract(epoch FROM clock_timestamp()) * 1000000)::int8,
                            (SELECT max(f.fence) + 1 FROM {floor} f))
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
-- Makes the row of a lock that is free; never in a transaction that goes on, for which others would wait.
CREATE OR REPLACE FUNCTION {make}(lock_key text) RETURNS void LANGUAGE sql AS $dlock$
  INSERT INTO {table} (key) VALUES (lock_key) ON CONFLICT (key) DO NOTHING
$dlock$;
-- The transactions that hold a lock, by hold_in or lock_in: with pg_stat_activity, what to wait for or to end.
CREATE OR REPLACE VIEW {pins} AS
  SELECT l.key, p.pid FROM {table} l
    JOIN pg_locks p ON p.locktype = 'advisory' AND p.objsubid = 2 AND p.classid::int8 = {pinned_oid}
     AND p.objid::int8 = (hashtext(l.key)::int8 & 4294967295)
     AND p.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database());
