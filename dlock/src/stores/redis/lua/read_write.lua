-- Steps on read-write locks: many readers, or one writer and those readers that it let in itself.
--
-- KEYS, ARGV and the reply to the whole call: see always.lua.
--
-- Data, as Redisson 4.7 has them:
--   HASH name              mode -> read or write; the id of a reader -> its holds; the writer's id with ':write'
--                          behind it -> its holds. Its TTL is that of the longest lease among them.
--   STRING {name}:ID:rwlock_timeout:N   1, for the N-th hold of a reader, with its lease as TTL. A reader without
--                          any of them does not count when another holder leaves, and is removed with the others.
-- Here a reader is a grant with one hold; 0 in its STRING says that it was released and keeps its lock for a while
-- yet. In addition, dlock has:
--   STRING {name}:ID:write:rwlock_timeout:1   the same for our writer, from when a reader came in under it until
--                          the last of these has left: meanwhile the hash may live longer than its lease.
--   ZSET {name}:dlock:readers   the index: each reader of ours -> until when its lease lasts, in ms of the epoch; and
--                          our writer -> inf, once a reader came in under it. Finds the longest lease without a look at
--                          every reader. Its TTL is that of the hash or longer.
--   ZSET {name}:dlock:writers   waiting writers for which dlock's readers stand back: waiter -> until when it
--                          counts unless it asks again, in ms of the epoch. Goes with the last of them.
--
-- Channel: redisson_rwlock:{name}, with 0 where one waiter may enter, or sooner than it was told, with 1 where all
-- may.

-- The index may lag behind the hash: a key was evicted, or Redisson deleted the hash, which leaves the index. So the index
-- counts only where it has every holder of the hash, and that takes no look at all of them:
--   - An id enters once and never comes back. A hash that was made anew holds no id of the old index, and a hash that was
--     not holds every id of the index. So one id of the index tells of all, and each change is preceded by that test.
--   - Then the numbers of fields and of entries are equal unless the hash has holders that the index does not know:
--     Redisson's, or ours whose entries were lost until their next renewal. Only then all fields are looked at.

local function add_read_write_steps()
  -- How long a writer counts without a request, and within which time it asks again, in ms.
  local KEPT, HEARD_WITHIN = 5000, 2000
  -- By how much the clock may be set back without a writer's notice, in ms.
  local SET_BACK = 1000
  -- How many readers whose leases have run out one step removes, and by how much a TTL may be off, in ms.
  local MOST, INEXACT = 256, 250
  local now_ms = math.floor(now / 1000)

  local function channel_of(key) return prefixed('redisson_rwlock', key) end
  local function timeout_of(key, holder, hold)
    return suffixed(key, holder .. ':rwlock_timeout:' .. (hold or '1'))
  end

  -- How the lock is held, nil if it is free. Ends the step where something else is there.
  local function held_as(key)
    local mode = ask('HGET', key, 'mode')
    if mode == 'read' or mode == 'write' then return mode end
    if is_wrong_type(mode) then error({ taken = type_of(key) }) end
    if is_error(mode) then error({ failed = mode.err }) end
    if not mode and not holder_of(key) then return nil end
    error({ taken = mode and 'hash' or 'plain lock' })
  end

  -- Whether this field is there. Other data in its place is a loss like any other.
  local function is_in(key, field)
    local found = ask('HEXISTS', key, field)
    if is_error(found) and not is_wrong_type(found) then error({ failed = found.err }) end
    return found == 1
  end

  local function left_of(key) return math.max(run('PTTL', key), -1) end

  -- Runs a command on a key beside the lock. An error names that key, behind its code.
  local function on(command, beside, ...)
    local reply = ask(command, beside, ...)
    if is_error(reply) then error({ failed = reply.err .. ' (' .. beside .. ')' }) end
    return reply
  end

  local function index_of(key) return suffixed(key, 'dlock:readers') end

  -- Drops the index of an earlier hash. Answers with the last entries of the index, two at most, each with its score.
  local function last_entries(key)
    local index = index_of(key)
    local last = on('ZRANGE', index, -2, -1, 'WITHSCORES')
    if #last == 0 or run('HEXISTS', key, last[#last - 1]) == 1 then return last end
    on('DEL', index)
    return {}
  end

  -- Puts a holder into the index, or moves it; the hash lasts for so long.
  local function enlist(key, id, score, ttl)
    local index = index_of(key)
    -- An index that its user may not take entries out of must not come to be. There is none yet, so this changes nothing.
    if #last_entries(key) == 0 then on('ZREM', index, id) end
    on('ZADD', index, score, id)
    on('PEXPIRE', index, ttl)
  end

  local function enlist_reader(key, id, lease, ttl)
    enlist(key, id, digits(now_ms + lease), math.max(lease, ttl))
  end

  -- Takes a holder out of the index. Other data in its place fails no release.
  local function strike_out(key, id) ask('ZREM', index_of(key), id) end

  -- What a reader has left, of the longest of its holds; below 1 for one whose leases have run out.
  local function reader_left(key, id, holds)
    local left = -2
    for hold = #holds < 6 and tonumber(holds) or 0, 1, -1 do
      left = math.max(left, run('PTTL', timeout_of(key, id, hold)))
    end
    return left
  end

  -- All holders: the readers and the remaining lease of each, the longest of these, and the field of the writer and
  -- its remaining lease: nil where that is what the hash has left, below 1 where its lease has run out.
  local function look_into(key)
    local fields = run('HGETALL', key)
    local found = { readers = {}, count = 0, longest = -2 }
    for at = 1, #fields, 2 do
      local id, holds = fields[at], fields[at + 1]
      if is_holder(id) then
        local left = reader_left(key, id, holds)
        table.insert(found.readers, { id = id, holds = holds, left = left })
        found.count = found.count + 1
        found.longest = math.max(found.longest, left)
      elseif string.sub(id, -6) == ':write' and is_holder(string.sub(id, 1, -7)) then
        found.writer = { field = id, id = string.sub(id, 1, -7), holds = holds }
      elseif id ~= 'mode' then
        -- A holder of a form that is not known here: it has what the hash has.
        found.longest = math.max(found.longest, left_of(key))
      end
    end
    -- Readers that came in under a writer of Redisson's have its id.
    local reader = found.writer and found.readers[1]
    if reader and reader.id ~= found.writer.id then
      found.writer.left = run('PTTL', timeout_of(key, found.writer.field))
    end
    return found
  end

  -- The same as far as the index knows it, without `readers`; and whether the index knows all holders.
  local function look_up(key)
    local index = index_of(key)
    local expired = on('ZRANGE', index, '-inf', now_ms, 'BYSCORE', 'LIMIT', 0, MOST)
    if #expired > 0 then
      run('HDEL', key, unpack(expired))
      on('ZREM', index, unpack(expired))
    end
    local last = last_entries(key)
    local entries = #last > 0 and on('ZCARD', index) or 0
    local found = { count = entries, longest = -2 }
    if last[#last] == 'inf' then
      local field = last[#last - 1]
      found.count = entries - 1
      found.writer = { field = field, id = string.sub(field, 1, -7) }
      if found.count > 0 then found.writer.left = run('PTTL', timeout_of(key, field)) end
    end
    local longest = last[found.writer and #last - 2 or #last]
    if longest then found.longest = tonumber(longest) - now_ms end
    return found, run('HLEN', key) == entries + 1
  end

  local function look(key)
    local found, is_all = look_up(key)
    return is_all and found or look_into(key)
  end

  -- Frees the lock after the last holder. Returns the number of receivers.
  local function open(key, message)
    run('DEL', key)
    ask('DEL', index_of(key))
    return tell(channel_of(key), message)
  end

  -- The writer has left, and the readers under it keep the lock: other readers may join them.
  local function leave_to_readers(key, found)
    if found.longest < 1 then return open(key, '1') end
    run('HSET', key, 'mode', 'read')
    if found.writer then
      run('HDEL', key, found.writer.field)
      strike_out(key, found.writer.field)
    end
    run('PEXPIRE', key, found.longest)
    return tell(channel_of(key), '1')
  end

  -- A holder has left, or has less time than before: the lock is kept for the longest lease that is left, and becomes
  -- available after the last. Notifies waiters of that, also where it takes much less time than they know, since the end
  -- of a lease notifies no waiter. Returns the number of receivers.
  local function settle(key)
    -- Only its mode is left.
    if run('HLEN', key) == 1 then return open(key, '0') end
    local before = run('PTTL', key)
    local found, is_all = look_up(key)
    if not is_all then
      -- There are other holders, none for longer than the longest of dlock's: nothing changes.
      local is_longest = found.longest > 0 and before <= found.longest + INEXACT
      if is_longest and run('HGET', key, 'mode') == 'read' then return 0 end
      found = look_into(key)
    end
    local writer = found.writer
    if writer and not writer.left and found.count == 0 then
      local timeout = timeout_of(key, writer.field)
      writer.left = run('PTTL', timeout)
      -- From now on its lease is the hash's again.
      if writer.left > 0 then
        run('DEL', timeout)
        strike_out(key, writer.field)
      end
    end
    if writer and writer.left and writer.left < 1 then return leave_to_readers(key, found) end
    local left = math.max(found.longest, writer and writer.left or -2)
    if left > 0 then
      run('PEXPIRE', key, left)
    elseif not writer then
      return open(key, '0')
    end
    -- Removes what dead dlock processes left behind. Redisson's readers may continue their own.
    for _, reader in ipairs(found.readers or {}) do
      if reader.left < 1 and is_ours(reader.id) then
        ask('HDEL', key, reader.id)
        strike_out(key, reader.id)
      end
    end
    return left > 0 and 2 * left < before and tell(channel_of(key)) or 0
  end

  -- Settles after a step that has been done, whatever becomes of this.
  local function settled(key)
    local ok, heard = pcall(settle, key)
    return released(ok and heard or -1)
  end

  local function writers_of(key) return suffixed(key, 'dlock:writers') end

  local function on_writers(command, key, ...) return on(command, writers_of(key), ...) end

  -- In how many ms the last waiting writer would be gone, nil where readers stand back for none. A time further ahead was set
  -- before the clock went back, or by nobody who waits.
  local function writers_wait(key)
    local longest, now_here = digits(now_ms + KEPT + SET_BACK), '(' .. digits(now_ms)
    local last = on_writers('ZRANGE', key, longest, now_here, 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')
    return last[2] and math.min(tonumber(last[2]) - now_ms, KEPT)
  end

  -- A writer waits, and has readers stand back from now on.
  local function stand_in_front(key, waiter)
    local gone = on_writers('ZRANGE', key, '-inf', now_ms, 'BYSCORE', 'LIMIT', 0, MOST)
    if #gone > 0 then on_writers('ZREM', key, unpack(gone)) end
    on_writers('ZADD', key, digits(now_ms + KEPT), waiter)
    on_writers('PEXPIRE', key, KEPT)
  end

  -- A writer waits no more. Readers go on, if it was the last.
  local function give_way(key, waiter)
    if on_writers('ZREM', key, waiter) == 1 and not writers_wait(key) then tell(channel_of(key), '1') end
  end

  -- Puts a new holder in, which may be ended by an error: then nothing of it stays.
  local function enter(key, mode, field, timeout, lease, tokens)
    local before = mode and left_of(key) or -2
    local ok, first, count = pcall(function()
      if timeout then run('SET', timeout, '1', 'PX', lease) end
      local first, count = take(tonumber(tokens), key, lease)
      if mode then
        run('HSET', key, field, '1')
      else
        run('HSET', key, 'mode', timeout and 'read' or 'write', field, '1')
      end
      local ttl = math.max(before, lease)
      run('PEXPIRE', key, ttl)
      if timeout then enlist_reader(key, field, lease, ttl) end
      return first, count
    end)
    if ok then return { 'acquired', first, count } end
    if timeout then
      ask('DEL', timeout)
      ask('ZREM', index_of(key), field)
    end
    if mode then
      ask('HDEL', key, field)
      if before > 0 then ask('PEXPIRE', key, before) end
    elseif is_error(ask('HDEL', key, field, 'mode')) then
      ask('DEL', key)
    end
    error(first)
  end

  -- Whether this write grant is inside; from now on its lease is kept apart from that of the hash.
  local function lets_in(key, mode, grant)
    local field = grant .. ':write'
    if mode ~= 'write' or run('HGET', key, field) ~= '1' then return false end
    local timeout = timeout_of(key, field)
    -- Beside readers its lease is its own, and may be over. Alone it has that of the hash; what is left of its own is from
    -- readers whose leases have ended.
    if run('HLEN', key) > 2 then return run('PTTL', timeout) > 0 end
    local left = math.max(left_of(key), 1)
    run('SET', timeout, '1', 'PX', left)
    enlist(key, field, '+inf', left)
    return true
  end

  -- grant, lease in ms, fencing tokens wanted, the write grant whose holder asks or ''
  function acquire_as.read(key, grant, lease, tokens, under)
    local mode = held_as(key)
    if under ~= '' then
      if not lets_in(key, mode, under) then return { 'busy', math.max(run('PTTL', key), 0) } end
    elseif mode == 'write' then
      local found = run('HLEN', key) > 2 and look(key)
      local left = found and found.writer and found.writer.left
      if not left or left > 0 then return { 'busy', left or left_of(key) } end
      leave_to_readers(key, found)
      mode = held_as(key)
    end
    local stays_out = under == '' and writers_wait(key)
    if stays_out then return { 'busy', mode and left_of(key) or stays_out, stays_out } end
    return enter(key, mode, grant, timeout_of(key, grant), lease, tokens)
  end

  -- grant, lease in ms, fencing tokens wanted, the waiter for which readers stand back or ''
  function acquire_as.write(key, grant, lease, tokens, waiter)
    local mode = held_as(key)
    if mode and waiter == '' then return { 'busy', left_of(key) } end
    if mode then
      stand_in_front(key, waiter)
      return { 'busy', left_of(key), HEARD_WITHIN }
    end
    local answer = enter(key, nil, grant .. ':write', nil, lease, tokens)
    -- Readers that stood back for it now wait for its lock.
    if waiter ~= '' then ask('ZREM', writers_of(key), waiter) end
    return answer
  end

  -- grant, ms to keep the lock taken yet
  function steps.release_read(key, grant, keep)
    local timeout = timeout_of(key, grant)
    local left = keep ~= '0' and is_in(key, grant) and run('PTTL', timeout) or 0
    if left > 0 then
      left = shorten(timeout, keep)
      -- A renewal that was on its way prolongs nothing.
      run('SET', timeout, '0', 'PX', left)
      pcall(enlist_reader, key, grant, left, left_of(key))
      local heard = settled(key)
      -- Waiters learn the time.
      return heard == 1 and released(tell(channel_of(key))) or heard
    end
    strike_out(key, grant)
    local gone = ask('HDEL', key, grant)
    if is_error(gone) and not is_wrong_type(gone) then error({ failed = gone.err }) end
    ask('DEL', timeout)
    return gone == 1 and settled(key) or 0
  end

  -- grant, ms to keep the lock taken yet; also of a writer that stops waiting, which answers 0
  function steps.release_write(key, grant, keep)
    local field = grant .. ':write'
    local timeout = timeout_of(key, field)
    if not is_in(key, field) then
      ask('DEL', timeout)
      pcall(give_way, key, grant)
      return 0
    end
    local is_alone = run('HLEN', key) == 2
    -- Of a lease that is over there is nothing to keep: the hash is that of the readers.
    if keep ~= '0' and (is_alone or run('PTTL', timeout) > 0) then
      shorten(is_alone and key or timeout, keep)
      run('HSET', key, field, '0')
      return released(tell(channel_of(key), '1'))
    end
    if is_alone then
      run('DEL', key, timeout)
      return released(tell(channel_of(key), '1'))
    end
    strike_out(key, field)
    run('HDEL', key, field)
    ask('DEL', timeout)
    local ok, heard = pcall(function() return leave_to_readers(key, look(key)) end)
    return released(ok and heard or -1)
  end

  -- grant, lease in ms
  function steps.renew_read(key, grant, lease)
    if not is_in(key, grant) then return 0 end
    local timeout = timeout_of(key, grant)
    local left = run('PTTL', timeout)
    if left < 1 then
      -- The lease is lost: the lock may go to other clients before the next release would say so.
      strike_out(key, grant)
      ask('HDEL', key, grant)
      settled(key)
      return 0
    end
    if run('GET', timeout) ~= '1' then return 0 end
    lease = tonumber(lease)
    run('PEXPIRE', timeout, lease)
    local ttl = left_of(key)
    -- Other data in place of the index fails no renewal.
    pcall(enlist_reader, key, grant, lease, ttl)
    -- A writer that it came in under may have run out meanwhile. A lease that is a little shorter than what is left
    -- was counted by another clock.
    if mode_of(key) == 'write' or left - lease > INEXACT then
      pcall(settle, key)
    elseif ttl < lease then
      -- A client of Redisson leaves the lock the lease that it has itself.
      run('PEXPIRE', key, lease)
    end
    return 1
  end

  -- grant, lease in ms
  function steps.renew_write(key, grant, lease)
    lease = tonumber(lease)
    local field = grant .. ':write'
    -- 0 is the field of one that was released and keeps the lock for a while yet.
    if not is_in(key, field) or run('HGET', key, field) ~= '1' then return 0 end
    if run('HLEN', key) == 2 then
      run('PEXPIRE', key, lease)
      return 1
    end
    -- It has run out, if this is nothing any more, and the readers that came in under it go on.
    local known = run('PEXPIRE', timeout_of(key, field), lease)
    if known == 1 then pcall(enlist, key, field, '+inf', math.max(left_of(key), lease)) end
    pcall(settle, key)
    return known
  end

  -- The holders. For Redisson a reader whose lease has expired is one until another holder releases: alone, it keeps
  -- writers out.
  table.insert(inspect_as, function(key)
    if not mode_of(key) then return nil end
    local found, rest = look_into(key), left_of(key)
    local answer, writer = { 'holders' }, found.writer
    local function add(...) for _, word in ipairs({ ... }) do table.insert(answer, word) end end
    if writer and (not writer.left or writer.left > 0) then
      add('write', writer.id, writer.holds, writer.left or rest)
    end
    local nobody = #answer == 1 and found.longest < 1
    for _, reader in ipairs(found.readers) do
      if reader.left > 0 then
        local kept = ask('GET', timeout_of(key, reader.id)) == '0'
        add('read', reader.id, kept and '0' or reader.holds, reader.left)
      elseif nobody then
        add('read', reader.id, reader.holds, rest)
      end
    end
    if #answer == 1 then error({ taken = 'hash' }) end
    return answer
  end)

  table.insert(force_as, function(key)
    if not mode_of(key) then return nil end
    local found = look_into(key)
    if not found.writer and #found.readers == 0 then error({ taken = 'hash' }) end
    local heard = open(key, '1')
    for _, reader in ipairs(found.readers) do
      for hold = reader.left > 0 and tonumber(reader.holds) or 0, 1, -1 do
        ask('DEL', timeout_of(key, reader.id, hold))
      end
    end
    if found.writer then ask('DEL', timeout_of(key, found.writer.field)) end
    return { 'released', heard }
  end)
end
