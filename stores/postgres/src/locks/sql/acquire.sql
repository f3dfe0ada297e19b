-- Acquires locks: each on its own, or all or none.
--   $1 keys  $2 grant ids  $3 kinds  $4 leases in µs  $5 numbers of tokens
--   $6 the server's time, in µs, after which the request is refused  $7 how many must be available, or 0: each on its own
--   $8 grant ids of the write locks in which reads are nested, or ''
-- Always returns one row for each key: fence and tokens if the lock was granted, whether its row was locked here, and the
-- row as it was before. Waits for no lock: a row that another transaction has locked counts as not available. Only
-- FOR UPDATE conflicts with the row lock of dlock_hold_in. Token and lease are computed after the row was locked, from the
-- clock at that time.
-- A reader that joins other readers locks the row with FOR NO KEY UPDATE, which does not conflict with transactions that
-- hold the lock for a reader: kind = 'read' says that no other transaction can hold it, because the first reader used
-- FOR UPDATE. Decisions depend only on the row of the lock, which is read again after it was locked. Rows of readers are
-- as old as the statement.
WITH asked AS MATERIALIZED (
  SELECT a.*, a.kind = 'read' AS reads
    FROM unnest($1::text[], $2::text[], $3::text[], $4::int8[], $5::int4[], $6::int8[], $8::text[])
         WITH ORDINALITY AS a(key, holder, kind, lease, tokens, refuse_after, nested, n)
), free AS MATERIALIZED (
  SELECT l.key, a.n FROM {table} l JOIN asked a USING (key)
   WHERE (l.holder = '' OR l.until <= clock_timestamp())
     AND CASE WHEN a.reads THEN a.nested = '' AND l.kind <> 'read' ELSE l.read_until <= clock_timestamp() END
   ORDER BY l.key
     FOR UPDATE OF l SKIP LOCKED
), joined AS MATERIALIZED (
  SELECT l.key, a.n FROM {table} l JOIN asked a USING (key)
   WHERE a.reads
     AND CASE WHEN a.nested = '' THEN l.kind = 'read' AND l.holder = ''
              ELSE l.holder = a.nested AND l.until > clock_timestamp() AND NOT l.kept END
   ORDER BY l.key
     FOR NO KEY UPDATE OF l SKIP LOCKED
), open AS MATERIALIZED (
  SELECT free.key, free.n, true AS alone FROM free UNION ALL SELECT joined.key, joined.n, false FROM joined
), clock AS MATERIALIZED (
  SELECT now, (extract(epoch FROM now) * 1000000)::int8 AS micros, open,
         (SELECT max(f.fence) + 1 FROM {floor} f) AS floor
    FROM (SELECT clock_timestamp() AS now, count(*) AS open FROM open) AS after_locking
), taken AS (
  UPDATE {table} l SET
         holder = CASE WHEN NOT a.reads THEN a.holder WHEN open.alone THEN '' ELSE l.holder END,
         kind = CASE WHEN open.alone THEN a.kind ELSE l.kind END,
         kept = l.kept AND NOT open.alone,
         until = CASE WHEN a.reads THEN l.until ELSE clock.now + a.lease * interval '1 microsecond' END,
         fence = CASE WHEN a.reads THEN l.fence
                      ELSE greatest(l.fence + l.tokens, l.read_next, clock.micros, clock.floor) END,
         tokens = CASE WHEN a.reads THEN l.tokens ELSE a.tokens END,
         read_next = CASE WHEN a.reads
                          THEN greatest(l.fence + l.tokens, l.read_next, clock.micros, clock.floor) + a.tokens
                          ELSE l.read_next END,
         read_until = CASE WHEN a.reads THEN greatest(l.read_until, clock.now + a.lease * interval '1 microsecond')
                           ELSE 'epoch' END,
         -- Not if readers remain that a writer admitted.
         era = CASE WHEN NOT a.reads OR open.alone AND l.read_until <= clock.now
                    THEN greatest(l.fence + l.tokens, l.read_next, clock.micros, clock.floor) ELSE l.era END
    FROM open JOIN asked a USING (n), clock
   WHERE l.key = open.key AND clock.micros <= a.refuse_after AND ($7::int8 = 0 OR clock.open = $7::int8)
  RETURNING a.n, a.reads, l.key, a.holder, l.era, CASE WHEN a.reads THEN l.read_next - a.tokens ELSE l.fence END AS fence,
            a.tokens, clock.now + a.lease * interval '1 microsecond' AS until
), admitted AS (
  INSERT INTO {readers} AS r (key, holder, era, fence, tokens, until)
  SELECT t.key, t.holder, t.era, t.fence, t.tokens, t.until FROM taken t WHERE t.reads
  ON CONFLICT (key, holder) DO UPDATE SET
     era = excluded.era, fence = excluded.fence, tokens = excluded.tokens, until = excluded.until, kept = false
)
SELECT taken.fence, taken.tokens, l.key IS NOT NULL AS there, clock.micros > a.refuse_after AS late,
       a.n IN (SELECT open.n FROM open) AS open, l.kind AS held_as,
       l.holder <> '' AND l.until > clock.now AND (l.holder <> a.nested OR l.kept)
         OR NOT a.reads AND l.read_until > clock.now AS held,
       -- A read that is nested in a write lock which is gone.
       a.nested <> '' AND (l.holder <> a.nested OR l.until <= clock.now) AS astray,
       (extract(epoch FROM greatest(CASE WHEN l.holder <> '' THEN l.until END,
                                    CASE WHEN NOT a.reads OR a.nested <> '' THEN l.read_until END) - clock.now)
        * 1000000)::int8 AS remaining,
       clock.micros AS now
  FROM asked a CROSS JOIN clock LEFT JOIN taken USING (n) LEFT JOIN {table} l ON l.key = a.key
 ORDER BY a.n
