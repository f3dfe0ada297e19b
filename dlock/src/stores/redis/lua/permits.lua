-- Steps on semaphores, beside those on locks.
--
-- KEYS, ARGV and the reply to the whole call: see always.lua; KEYS[1 + i] is the semaphore of step i. Answers:
--   acquired FIRST COUNT | busy PTTL AGAIN-ms (-1 for none) | beyond (there are fewer in all) | late |
--   taken WHAT (other data) |
--   failed MESSAGE (nothing was changed); of releases and renewals numbers as those of locks
--
-- Data, as Redisson 4.7 has them for RPermitExpirableSemaphore and, without the second, for RSemaphore:
--   STRING name             how many permits are free; below zero while more are held than there are
--   ZSET   {name}:timeout   permit id (16 raw bytes) -> until when it is held, epoch ms; 922337203685477 for ever
-- The channel redisson_sc:{name} gets the number of free permits whenever that grew and is above zero, and 0 where a greater
-- total leaves none free.
-- In addition, dlock has:
--   HASH   {name}:dlock:queue     the waiters, while one waits for several permits: waiter -> "SINCE-µs AMOUNT UNTIL-ms"
--   STRING {name}:dlock:GRANT     "AMOUNT SINCE-µs": how many permits without a known holder a grant took, and when, for as
--                                 long as the grant may be undone
--   STRING {name}:dlock:deleted   when the semaphore was deleted, in µs, for a minute

-- Adds the steps, where one of them is asked for: calls without any do not pay for them. Answers with what
-- counters.lua needs of it.
local function add_permit_steps()
  local now_ms = math.floor(now / 1000)
  local never = '922337203685477'
  -- How long a waiter keeps its queue position without a request, and within which time it sends the next one.
  local kept, heard_within = 5000, 2000
  -- By how much the clock may be set back without a waiter's notice, in ms.
  local set_back = 1000
  -- How long the key of holders outlives the last lease.
  local beyond_lease = 5000
  -- How many permits whose leases have ended are removed in a call: a process that is gone may have had any number.
  local MOST = 256

  local function semaphore_of(key)
    return {
      free_key = key, held_key = suffixed(key, 'timeout'), queue_key = suffixed(key, 'dlock:queue'),
      channel = prefixed('redisson_sc', key),
      -- How many permits whose leases have ended are still among those that are held. They count as free: the number has
      -- them only once they are removed.
      left_over = 0,
    }
  end

  -- Notifies waiters that more permits are free, or that others may continue; returns the number of receivers.
  local function tell_free(semaphore)
    -- Without a total, waiters have limits of their own.
    if not semaphore.free then return tell(semaphore.channel, '1') end
    if semaphore.free <= 0 then return 0 end
    return tell(semaphore.channel, semaphore.free)
  end

  -- Notifies waiters of a greater total: one that wants more permits than there were takes a queue position now, though none is
  -- free. Redisson wakes as many waiters as the message says.
  local function tell_total(semaphore)
    if semaphore.free > 0 then return tell_free(semaphore) end
    return tell(semaphore.channel, '0')
  end

  -- A write that changes nothing: after it, a full server accepts releases and renewals, see shorten.
  local function begin_to_write(semaphore) ask('ZREM', semaphore.held_key, '') end

  -- More permits are free, or fewer.
  local function change(semaphore, by)
    if by ~= 0 and semaphore.free then
      semaphore.free = run('INCRBY', semaphore.free_key, by) + semaphore.left_over
    end
    return semaphore.free
  end

  -- Removes so many permits whose leases have ended: all, or the first of them.
  local function remove_expired(semaphore, count)
    if semaphore.left_over == 0 then return ask('ZREMRANGEBYSCORE', semaphore.held_key, '-inf', now_ms) end
    return ask('ZREM', semaphore.held_key, unpack(ask('ZRANGE', semaphore.held_key, 0, count - 1)))
  end

  -- Frees the permits whose leases have ended.
  local function free_expired(semaphore)
    local expired = ask('ZCOUNT', semaphore.held_key, '-inf', now_ms)
    if is_wrong_type(expired) then error({ taken = type_of(semaphore.held_key) .. ' at ' .. semaphore.held_key }) end
    if is_error(expired) then error({ failed = expired.err }) end
    if expired == 0 then return end
    local count = math.min(expired, MOST)
    semaphore.left_over = expired - count
    change(semaphore, count)
    local gone = remove_expired(semaphore, count)
    if is_error(gone) then
      if semaphore.free then ask('INCRBY', semaphore.free_key, -count) end
      error({ failed = gone.err })
    end
    tell_free(semaphore)
  end

  -- The number of free permits, nil where no total is set.
  local function look(semaphore)
    semaphore.free = number_at(semaphore.free_key)
    free_expired(semaphore)
    return semaphore.free
  end

  -- The same for a holder. Permits without a total leave the name itself free, and a lock may have taken it since.
  local function look_as_holder(semaphore)
    local ok, number = pcall(number_at, semaphore.free_key)
    if ok then
      semaphore.free = number
    elseif type(number) ~= 'table' or number.taken ~= 'hash' then
      error(number)
    end
    free_expired(semaphore)
  end

  local function held(semaphore) return run('ZCARD', semaphore.held_key) - semaphore.left_over end

  -- Without a total the holders are all there is, and nobody may ask any more when the last of them has gone.
  local function go_with_the_last(semaphore)
    if semaphore.free then return end
    local last = ask('ZRANGE', semaphore.held_key, -1, -1, 'WITHSCORES')
    if is_error(last) or not last[1] then return end
    ask('PEXPIRE', semaphore.held_key, digits(math.max(tonumber(last[2]) - now_ms, 0) + beyond_lease))
  end

  -- A total stays, and with it what is held of it.
  local function stay_with_total(semaphore) ask('PEXPIRE', semaphore.held_key, never) end

  -- The same for a total that others have set since.
  local function stays_with_total(semaphore)
    local left = semaphore.free and ask('PTTL', semaphore.held_key) or -1
    if is_error(left) or left < 0 or left > never / 2 then return end
    if ask('PTTL', semaphore.free_key) == -1 then stay_with_total(semaphore) end
  end

  local function found(key)
    local semaphore = semaphore_of(key)
    look(semaphore)
    return semaphore
  end

  -- Adds or moves the permits of these ids. All or none: what could fail for one of them fails for the first.
  local function hold(semaphore, ids, mode, score)
    for at = 1, #ids, 16 do
      local set = ask('ZADD', semaphore.held_key, mode, score, string.sub(ids, at, at + 15))
      if is_error(set) then return set end
    end
  end

  -- The id of a permit that was released and stays taken for a while. No grant has it, so neither a renewal in flight
  -- nor another release finds it. The bit is above all amounts.
  local function kept_id(id)
    return string.sub(id, 1, 12) .. string.char((string.byte(id, 13) + 128) % 256) .. string.sub(id, 14)
  end

  -- Keeps the permits of these ids taken for at most so many ms.
  local function keep_taken(semaphore, ids, keep)
    for at = 1, #ids, 16 do
      local id = string.sub(ids, at, at + 15)
      local upto = run('ZSCORE', semaphore.held_key, id)
      if upto then
        run('ZADD', semaphore.held_key, digits(math.min(tonumber(upto), now_ms + keep)), kept_id(id))
        run('ZREM', semaphore.held_key, id)
      end
    end
  end

  -- Which of these ids are held, in one text, and how many there are.
  local function held_of(semaphore, ids)
    local there = {}
    for at = 1, #ids, 16 do
      local id = string.sub(ids, at, at + 15)
      local upto = run('ZSCORE', semaphore.held_key, id)
      if upto and tonumber(upto) > now_ms then there[#there + 1] = id end
    end
    return table.concat(there), #there
  end

  -- Removes what has ended of these ids, which are to be held anew.
  local function remove_left_over(semaphore, ids)
    if semaphore.left_over == 0 then return end
    for at = 1, #ids, 16 do
      local id = string.sub(ids, at, at + 15)
      local upto = run('ZSCORE', semaphore.held_key, id)
      if upto and tonumber(upto) <= now_ms then
        semaphore.left_over = semaphore.left_over - 1
        change(semaphore, 1)
        run('ZREM', semaphore.held_key, id)
      end
    end
  end

  -- The waiters in order of arrival, without those that sent no request for too long. Where each waits for one permit
  -- there is no order: the first request gets it.
  local function queue_of(semaphore)
    local fields = ask('HGETALL', semaphore.queue_key)
    if is_wrong_type(fields) then error({ taken = type_of(semaphore.queue_key) .. ' at ' .. semaphore.queue_key }) end
    if is_error(fields) then error({ failed = fields.err }) end
    local queue, most = {}, 1
    for at = 1, #fields, 2 do
      local since, amount, alive = string.match(fields[at + 1], '^(%d+) (%d+) (%d+)$')
      -- One that is kept for longer was alive before the clock was set back.
      if since and tonumber(alive) > now_ms and tonumber(alive) <= now_ms + kept + set_back then
        queue[#queue + 1] = {
          id = fields[at], since = tonumber(since), amount = tonumber(amount), alive = tonumber(alive),
        }
        most = math.max(most, tonumber(amount))
      else
        run('HDEL', semaphore.queue_key, fields[at])
      end
    end
    if most == 1 then
      if #queue > 0 then run('DEL', semaphore.queue_key) end
      return {}
    end
    table.sort(queue, function(a, b)
      if a.since ~= b.since then return a.since < b.since end
      return a.id < b.id
    end)
    return queue
  end

  -- Whether earlier waiters leave enough permits; the waiter's own queue position, if it has one; and in how many ms an
  -- earlier waiter may have lost its position, -1 where there is none. A waiter for more permits than exist blocks no
  -- other.
  local function has_room(free, queue, amount, waiter, total)
    local left, mine, look_in = free, nil, -1
    for _, other in ipairs(queue) do
      if other.id == waiter then
        mine = other
        break
      end
      if other.amount <= total then
        left = left - other.amount
        local gone_in = other.alive - now_ms + 1
        if look_in < 0 or gone_in < look_in then look_in = gone_in end
      end
    end
    return left >= amount, mine, look_in
  end

  -- Takes or keeps a queue position where a waiter waits for several permits; returns when to ask again.
  local function stand_in_line(semaphore, queue, amount, waiter, mine, total, look_in)
    if waiter == '' then return look_in end
    if amount > total then
      if mine then run('HDEL', semaphore.queue_key, waiter) end
      return look_in
    end
    if amount == 1 and #queue == 0 then return -1 end
    local since = digits(mine and mine.since or now)
    run('HSET', semaphore.queue_key, waiter, since .. ' ' .. amount .. ' ' .. digits(now_ms + kept))
    run('PEXPIRE', semaphore.queue_key, 2 * kept)
    return look_in < 0 and heard_within or math.min(heard_within, look_in)
  end

  -- The time until the first lease of a held permit ends, in ms; -1 for ever.
  local function first_end(semaphore)
    local at = semaphore.left_over
    local first = run('ZRANGE', semaphore.held_key, at, at, 'WITHSCORES')
    if not first[1] or first[2] == never then return -1 end
    return math.max(0, tonumber(first[2]) - now_ms)
  end

  -- Sets the number of free permits where there is none.
  local function set_free(semaphore, free)
    run('SET', semaphore.free_key, digits(free - semaphore.left_over))
    semaphore.free = free
    stay_with_total(semaphore)
  end

  -- Sets the total where none is set; permits that are held already count. Callers that name no total wait for one.
  local function begin(semaphore, total, out)
    set_free(semaphore, tonumber(total) - out)
    tell_free(semaphore)
  end

  -- Undoes what was done of an acquire, which has failed.
  local function put_back(semaphore, ids, amount, failure)
    for at = 1, #ids, 16 do ask('ZREM', semaphore.held_key, string.sub(ids, at, at + 15)) end
    if semaphore.free then ask('INCRBY', semaphore.free_key, amount) end
    error({ failed = failure.err })
  end

  -- ids, lease in ms, fencing tokens wanted, how many there are in all or '', waiter or '', how many may be
  -- held at most or nil
  function acquire_as.permit(key, ids, lease, wanted, total, waiter, limit)
    local semaphore = found(key)
    if not semaphore.free then
      if total == '' and not limit then return { 'busy', -1, -1 } end
      if total ~= '' then begin(semaphore, total, held(semaphore)) end
    end
    local amount = #ids / 16
    local queue = queue_of(semaphore)
    local free, all = semaphore.free, nil
    if limit then
      local out = held(semaphore)
      free = math.min(free or math.huge, tonumber(limit) - out)
      all = free + out
    else
      all = free + ((#queue > 0 or free < amount) and held(semaphore) or 0)
    end
    local has, mine, look_in = has_room(free, queue, amount, waiter, all)
    if not has then
      local again = stand_in_line(semaphore, queue, amount, waiter, mine, all, look_in)
      -- A limit may be one that admits nothing: there is no number that could be raised.
      local ends = first_end(semaphore)
      if limit and ends < 0 and again < 0 then again = heard_within end
      if amount > all and not limit then return { 'beyond' } end
      return { 'busy', ends, again }
    end
    remove_left_over(semaphore, ids)
    local first, count = take(wanted)
    change(semaphore, -amount)
    local set = hold(semaphore, ids, 'NX', digits(now_ms + lease))
    if set then put_back(semaphore, ids, amount, set) end
    -- Nothing may fail from here on.
    local ttl = semaphore.free and ask('PTTL', key) or -1
    if not is_error(ttl) and ttl > 0 then ask('PEXPIRE', semaphore.held_key, ttl) end
    stays_with_total(semaphore)
    go_with_the_last(semaphore)
    if mine then ask('HDEL', semaphore.queue_key, waiter) end
    -- Those behind it may go on, too.
    if #queue > 0 then tell_free(semaphore) end
    return { 'acquired', first, count }
  end

  -- ids, id of the grant, ms to keep them taken yet
  function steps.release_permit(key, ids, grant, keep)
    local semaphore = semaphore_of(key)
    begin_to_write(semaphore)
    local ok, failure = pcall(look_as_holder, semaphore)
    -- Other data in its place is a loss like any other.
    if type(failure) == 'table' and failure.taken then return 0 end
    if not ok then error(failure) end
    local held_ids, there = held_of(semaphore, ids)
    if there == 0 then
      if run('HDEL', semaphore.queue_key, grant) == 1 then tell_free(semaphore) end
      return 0
    end
    if keep ~= '0' then
      keep_taken(semaphore, held_ids, keep)
      go_with_the_last(semaphore)
      -- The waiters learn the time. For Redisson the message is how many may ask.
      local heard = tell(semaphore.channel, '1')
      return there * 16 == #ids and released(heard) or 0
    end
    -- What may fail comes first, and undoes nothing then.
    if semaphore.free then change(semaphore, there) end
    for at = 1, #held_ids, 16 do
      local gone = ask('ZREM', semaphore.held_key, string.sub(held_ids, at, at + 15))
      if is_error(gone) then
        if semaphore.free then change(semaphore, -there) end
        error({ failed = gone.err })
      end
    end
    stays_with_total(semaphore)
    -- Where some of them are gone, the holder has lost them all.
    local heard = tell_free(semaphore)
    return there * 16 == #ids and released(heard) or 0
  end

  -- ids, lease in ms
  function steps.renew_permit(key, ids, lease)
    local semaphore = semaphore_of(key)
    begin_to_write(semaphore)
    look_as_holder(semaphore)
    if #held_of(semaphore, ids) < #ids then return 0 end
    local set = hold(semaphore, ids, 'XX', digits(now_ms + lease))
    if set then error({ failed = set.err }) end
    stays_with_total(semaphore)
    go_with_the_last(semaphore)
    return 1
  end

  local function taken_key(key, grant) return suffixed(key, 'dlock:' .. grant) end

  local function deleted_key(key) return suffixed(key, 'dlock:deleted') end

  -- What was taken before goes with the semaphore, and is not put back into one of the same name. Clients undo an acquire within a
  -- minute: it is the lease of all acquires without an owner.
  local function remember_deletion(key) ask('SET', deleted_key(key), digits(now), 'PX', 60000) end

  -- amount, grant, ms for which it may be undone, how many there are in all or ''
  function acquire_as.unowned(key, amount, grant, remember, total)
    local semaphore = semaphore_of(key)
    semaphore.free = number_at(key)
    if not semaphore.free and total == '' then return { 'busy', -1, -1 } end
    local sees = false
    if not semaphore.free or semaphore.free < tonumber(amount) then
      -- Permits with holders count: those whose leases have ended are free. A user without the right to see them has none.
      local ok, out = pcall(function()
        look(semaphore)
        return held(semaphore)
      end)
      sees = ok
      if not ok then
        semaphore, out = semaphore_of(key), 0
        semaphore.free = number_at(key)
      end
      if not semaphore.free then begin(semaphore, total, out) end
    end
    if semaphore.free < tonumber(amount) then
      -- A user who may only count the holders does not learn when one of them ends.
      local ends
      if sees then sees, ends = pcall(first_end, semaphore) end
      return { 'busy', sees and ends or -1, -1 }
    end
    local mine = taken_key(key, grant)
    run('SET', mine, amount .. ' ' .. digits(now), 'PX', remember)
    local taken = ask('INCRBY', key, -amount)
    if is_error(taken) then
      ask('DEL', mine)
      error({ failed = taken.err })
    end
    -- Without a holder there is no fencing token.
    return { 'acquired', 0, 1 }
  end

  -- grant: undoes it
  function steps.release_unowned(key, grant)
    local mine = taken_key(key, grant)
    local amount, since = string.match(run('GET', mine) or '', '^(%d+) (%d+)$')
    local semaphore = semaphore_of(key)
    semaphore.free = amount and number_at(key)
    if not semaphore.free then return 0 end
    if tonumber(since) <= (number_at(deleted_key(key)) or 0) then return 0 end
    shorten(mine, '60000')
    change(semaphore, amount)
    local gone = ask('DEL', mine)
    if is_error(gone) then
      change(semaphore, -amount)
      error({ failed = gone.err })
    end
    return released(tell_free(semaphore))
  end

  -- grant, ms for which it may be undone
  function steps.renew_unowned(key, grant, remember)
    return run('PEXPIRE', taken_key(key, grant), remember)
  end

  -- Whether the holders found beside a key without a number are those of another semaphore: `x` and `{x}` have them under one
  -- name, and only one of the two has the number.
  local function are_of_another(key)
    local other = string.match(key, '^{([^{}]+)}$') or not has_tag(key) and '{' .. key .. '}'
    if not other then return false end
    local ok, free = pcall(number_at, other)
    return ok and free and true
  end

  -- The permits of a key that are held, and their number of free ones; nil where it holds something else.
  local function seen_at(key)
    local ok, free = pcall(number_at, key)
    if ok then
      if free then return found(key) end
      -- A semaphore with limits of its waiters has no number. A user who may only use locks may not read it, and has no
      -- semaphores.
      local out = ask('ZCARD', suffixed(key, 'timeout'))
      if is_error(out) or out == 0 or are_of_another(key) then return nil end
      return found(key)
    end
    if type(free) == 'table' and free.taken then return nil end
    error(free)
  end

  local function hex(id)
    return (string.gsub(id, '.', function(byte) return string.format('%02x', string.byte(byte)) end))
  end

  table.insert(inspect_as, function(key)
    local semaphore = seen_at(key)
    if not semaphore then return nil end
    local all = run('ZRANGE', semaphore.held_key, semaphore.left_over, -1, 'WITHSCORES')
    if #all == 0 then return { 'free' } end
    local answer = { 'holders' }
    for at = 1, #all, 2 do
      local left = all[at + 1] == never and -1 or tonumber(all[at + 1]) - now_ms
      for _, word in ipairs({ 'permit', hex(all[at]), '1', left }) do answer[#answer + 1] = word end
    end
    return answer
  end)

  table.insert(force_as, function(key)
    local semaphore = seen_at(key)
    if not semaphore then return nil end
    local count = held(semaphore)
    if count == 0 then return { 'gone' } end
    -- What has ended goes along.
    count, semaphore.left_over = count + semaphore.left_over, 0
    change(semaphore, count)
    local gone = ask('DEL', semaphore.held_key)
    if is_error(gone) then
      change(semaphore, -count)
      error({ failed = gone.err })
    end
    return { 'released', tell_free(semaphore) }
  end)

  return {
    found = found, held = held, are_of_another = are_of_another, change = change, tell_total = tell_total,
    set_free = set_free, remember_deletion = remember_deletion,
  }
end
