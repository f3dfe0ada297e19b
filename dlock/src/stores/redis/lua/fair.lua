-- Steps on fair locks: waiters join a queue, and acquire in its order.
--
-- KEYS, ARGV and the reply to the whole call: see always.lua. The steps:
--   fair GRANT LEASE-ms TOKENS WAITS LAST-ms   an acquire; WAITS is 1 for a waiter that joins the queue if the lock is
--                                              busy, LAST is the time since its last request, -1 for the first. With
--                                              tokens for more than one, `acquired` is followed by the numbers of the
--                                              next waiters of the same client. A waiter that stays in the queue gets a
--                                              number, as in an acquire of a plain lock
--   release_fair GRANT KEEP-ms                 as release; also leaves the queue, which answers 0
-- Of an available lock that others wait for, `busy` tells when the queue head is overdue.
--
-- Data, as Redisson 4.7 has them: the hash of the plain lock, and
--   LIST redisson_lock_queue:{name}     the waiters
--   ZSET redisson_lock_timeout:{name}   until when each waiter keeps its position, in ms of the epoch: as queue head it is
--                                       overdue after that
-- Channel: redisson_lock__channel:{name}:ID of the queue head, with 0 when the lock becomes available.
--
-- A waiter of dlock keeps its position for PLACE unless it asks again. A waiter of Redisson keeps it for its patience (300 s
-- by default, or its wait time) after the time of the waiter before it; when it acquires or gives up, it subtracts its
-- patience from the times of all others, or of the waiters behind it. So a waiter of dlock adds to PLACE the patience of all
-- waiters of Redisson before it, and waiters of Redisson behind it move with it. The times of a group, the waiters between
-- two of Redisson's, are nearly equal: so the order of the times shows the groups, without a search in the list. When the last of a
-- group leaves the head for one of Redisson's, what is left of its time is subtracted from all others; otherwise each group
-- would add to the times of a queue that is never empty, and a dead waiter of Redisson's would keep its position for as long.
--
-- Other steps do not look at the whole queue, and each removes a bounded number of entries; the next step continues. Redis cannot
-- remove an entry from the middle of a list at once, so a waiter of dlock that gives up there is marked: its time gets half
-- a millisecond. Waiters of dlock ignore it; for Redisson it is an overdue waiter. A separate mark beside the list would
-- stay when Redisson removes the waiter.

local function add_fair_steps()
  local PLACE = 5000
  -- By how much the clock may be set back without a waiter's notice, in ms.
  local SET_BACK = 1000
  -- When the keys of a queue expire in which no waiter of dlock has sent a request for so long, in ms.
  local RESIDUE = 3600000
  -- How many entries one step reads or removes at either end of the queue, and on the way to a position in its middle.
  local MOST, FEW = 256, 32
  local now_ms = math.floor(now / 1000)

  -- The findings of the step before, if this step is about the same lock: in a call with many steps on it nearly all of
  -- them still hold. `left` and `holder` are those of the lock; `last` is the last in the queue if it is a waiter of dlock;
  -- `is_calm` says that no position is kept for longer than that of a new waiter of dlock, `is_kept` that the expiry of the
  -- queue's keys is set.
  local seen = {}
  local function seen_of(key)
    if seen.key ~= key or seen.step < step - 1 then seen = { key = key } end
    seen.step = step
    return seen
  end

  -- How long a lock is still held, -2 if it is available, and its holder.
  local function held(key)
    local known = seen_of(key)
    if not known.holder then
      local left = run('PTTL', key)
      local holder = left ~= -2 and holder_of(key)
      -- It may have expired since its time was read.
      if not holder then return -2 end
      known.left, known.holder = left, holder
    end
    return known.left, known.holder
  end

  local function names_of(key)
    return prefixed('redisson_lock_queue', key), prefixed('redisson_lock_timeout', key)
  end

  local function channel_of(key, id)
    local channel = prefixed('redisson_lock__channel', key)
    return id and channel .. ':' .. id or channel
  end

  -- Runs a command on one of the two keys; an error names a key that holds other data, behind its code.
  local function on(command, key, ...)
    local reply = ask(command, key, ...)
    if is_error(reply) then error({ failed = reply.err .. ' (' .. key .. ')' }) end
    return reply
  end

  -- Until when a waiter keeps its position, nil if it has none.
  local function time_of(times, id) return tonumber(on('ZSCORE', times, id) or nil) end

  local function has_left(id, upto) return upto and upto % 1 ~= 0 and is_ours(id) end
  local function is_gone(id, upto) return not upto or upto <= now_ms or has_left(id, upto) end

  -- The id at this end of the queue and its time.
  local function entry_at(queue, times, index)
    local id = on('LINDEX', queue, index)
    return id, id and time_of(times, id)
  end

  -- Removes entries at one end of the queue, as long as the test holds.
  local function clear(queue, times, at_head, test)
    local ids = on('LRANGE', queue, at_head and 0 or -MOST, at_head and MOST - 1 or -1)
    if #ids == 0 then return end
    local uptos, gone = on('ZMSCORE', times, unpack(ids)), {}
    for i = 1, #ids do
      local at = at_head and i or #ids + 1 - i
      if not test(ids[at], tonumber(uptos[at] or nil)) then break end
      gone[i] = ids[at]
    end
    if #gone == 0 then return end
    on('LTRIM', queue, at_head and #gone or 0, at_head and -1 or -1 - #gone)
    on('ZREM', times, unpack(gone))
  end

  -- The queue head after overdue waiters are removed: its id, whether any were removed, and for how long it keeps its
  -- position: 0 if an overdue one is still in front. The waiter that asks is not overdue.
  local function front(queue, times, asker)
    local id, upto = entry_at(queue, times, 0)
    local have_left = id and id ~= asker and is_gone(id, upto)
    if have_left then
      clear(queue, times, true, function(other, its) return other ~= asker and is_gone(other, its) end)
      id, upto = entry_at(queue, times, 0)
    end
    if not id then return nil, have_left end
    -- At the head, one of dlock has more time only where the clock was set back, or one of Redisson's before it died.
    if id ~= asker and upto and upto > now_ms + PLACE + SET_BACK and is_ours(id) then
      upto = now_ms + PLACE
      on('ZADD', times, digits(upto), id)
    end
    return id, have_left, is_gone(id, upto) and 0 or upto - now_ms
  end

  -- Removes a waiter from the queue, or marks it in the middle of a long one.
  local function leave(queue, times, id, upto)
    for _, from in ipairs({ 1, -1 }) do
      if on('LPOS', queue, id, 'RANK', from, 'MAXLEN', MOST) then
        on('LREM', queue, from, id)
        return on('ZREM', times, id)
      end
    end
    if on('LLEN', queue) <= MOST then
      on('ZREM', times, id)
    elseif upto then
      on('ZADD', times, digits(math.floor(upto)) .. '.5', id)
    end
  end

  -- A waiter of dlock has left the queue, or asks again. A new waiter of Redisson computes its time from that of the last
  -- entry, which must not be the old one of a waiter that has left; and waiters of Redisson do not renew the expiry of
  -- their keys.
  local function tidy_end(queue, times)
    local last, upto = entry_at(queue, times, -1)
    if last and has_left(last, upto) then
      clear(queue, times, false, has_left)
      last = on('LINDEX', queue, -1)
    end
    if last and not is_ours(last) then
      on('PERSIST', queue)
      on('PERSIST', times)
      seen.is_kept = false
    end
    return last
  end

  -- Changes the time of a waiter of dlock. Waiters of Redisson right behind its group keep their distance to its last one.
  local function keeping_distance(times, upto, change)
    local beyond = on('ZRANGE', times, '(' .. digits(upto + PLACE), '+inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')
    if not beyond[1] or is_ours(beyond[1]) then return change() end
    local function last_before()
      return tonumber(on('ZRANGE', times, '(' .. beyond[2], '-inf', 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')[2])
    end
    local before = last_before()
    change()
    local after = last_before()
    if not before or not after or before == after then return end
    local moved, offset = {}, 0
    repeat
      local some = on('ZRANGE', times, beyond[2], '+inf', 'BYSCORE', 'LIMIT', offset, MOST, 'WITHSCORES')
      local is_over = #some < 2 * MOST
      for i = 1, #some, 2 do
        is_over = is_over or is_ours(some[i])
        if is_ours(some[i]) then break end
        table.insert(moved, { digits(some[i + 1] + after - before), some[i] })
      end
      offset = offset + MOST
    until is_over
    for _, one in ipairs(moved) do on('ZADD', times, one[1], one[2]) end
  end

  -- What is left of the time of the last of the first waiters, which leave the head, if one of Redisson's is behind them.
  local function left_behind(queue, times, count, last)
    if seen.is_calm then return 0 end
    local next_one = on('LINDEX', queue, count)
    if not next_one or is_ours(next_one) then return 0 end
    return math.max(0, math.floor(time_of(times, last) or 0) - now_ms)
  end

  -- Subtracts it from the times of all that wait. None gets less than a new waiter of dlock, unless it had less.
  local function close_up(times, gap)
    local from = 0
    while gap > 0 do
      local some, closer = on('ZRANGE', times, from, from + MOST - 1, 'WITHSCORES'), {}
      for i = 1, #some, 2 do
        local id, upto = some[i], tonumber(some[i + 1])
        local its = math.floor(upto)
        its = math.max(its - gap, math.min(its, now_ms + PLACE))
        closer[i], closer[i + 1] = digits(its) .. (has_left(id, upto) and '.5' or ''), id
      end
      if closer[1] then on('ZADD', times, unpack(closer)) end
      if #some < 2 * MOST then return end
      from = from + MOST
    end
  end

  -- The first waiter whose position is kept for longer than that of a new waiter of dlock: one of Redisson, or one of dlock
  -- that was behind one. nil if there is none.
  local function first_beyond(times, new)
    if seen.is_calm then return {} end
    local first = on('ZRANGE', times, '(' .. digits(new + 1), '+inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')
    seen.is_calm = not first[1]
    return first
  end

  local function time_of_newcomer(times)
    local new = now_ms + PLACE
    if not first_beyond(times, new)[1] then return new end
    -- All waiters are before it.
    local longest = on('ZRANGE', times, -1, -1, 'WITHSCORES')
    local its = math.floor(longest[2])
    return is_ours(longest[1]) and math.max(new, its) or its + PLACE
  end

  -- Until when a position is kept that was kept until `upto`, if that is known, and whose last request is so long ago.
  local function new_time(queue, times, grant, upto, last)
    local new = now_ms + PLACE
    local first = first_beyond(times, new)
    if not first[1] then return new end
    if not upto then return time_of_newcomer(times) end
    local has_theirs = first[1] ~= grant and (is_ours(first[1]) or tonumber(first[2]) < upto)
    if first[1] == grant then
      -- A queue head may have little of its time left.
      local head, its = entry_at(queue, times, 0)
      has_theirs = head and not is_ours(head) and not is_gone(head, its)
    end
    -- The patience of the first waiters can no longer be read. That of all was known when this one joined, and each waiter
    -- that left since has subtracted its own.
    return has_theirs and math.max(new, math.floor(upto) + last) or new
  end

  -- The position of a waiter that has sent no request for too long: before all that joined after it. The waiters that were
  -- before it have lost their positions too, unless they are back: those of its own client are known, in the order of their
  -- numbers.
  local function take_back(queue, grant)
    local client, number = string.match(grant, '^(.*:)(%d+)$')
    number = tonumber(number)
    local from, to, earlier = 0, on('LLEN', queue), nil
    while from < to do
      local is_far = to - from > MOST
      local at = is_far and math.floor((from + to) / 2) or from
      local ids, found = on('LRANGE', queue, at, math.min(at + (is_far and FEW or MOST), to) - 1), nil
      for i, id in ipairs(ids) do
        local its = string.sub(id, 1, #client) == client and tonumber(string.sub(id, #client + 1))
        if its and its < number then earlier, found = id, i end
      end
      if found then
        from = at + found
      else
        to = at
      end
    end
    local head = not earlier and on('LINDEX', queue, 0)
    if earlier then
      on('LINSERT', queue, 'AFTER', earlier, grant)
    elseif head then
      on('LINSERT', queue, 'BEFORE', head, grant)
    else
      on('RPUSH', queue, grant)
    end
  end

  -- Whether the list has a waiter. Each entry of the list has a time and each time an entry, unless a key was evicted or
  -- deleted; only then the list is searched.
  local function stands_in(queue, times, grant, upto)
    local length = on('LLEN', queue)
    if length == on('ZCARD', times) then return upto end
    if length > 0 then return on('LPOS', queue, grant) end
    on('DEL', times)
  end

  local function keep_queue(queue, times)
    if seen.is_kept then return end
    on('PEXPIRE', queue, RESIDUE)
    on('PEXPIRE', times, RESIDUE)
    seen.is_kept = true
  end

  -- New waiters join at the end.
  local function join(queue, times, grants)
    local new, entries = digits(time_of_newcomer(times)), {}
    for i = 1, #grants do entries[2 * i - 1], entries[2 * i] = new, grants[i] end
    on('RPUSH', queue, unpack(grants))
    on('ZADD', times, unpack(entries))
    seen.last = grants[#grants]
    keep_queue(queue, times)
  end

  -- A waiter in the queue asks again.
  local function stay(queue, times, grant, last)
    local upto = time_of(times, grant)
    local new = new_time(queue, times, grant, upto, last)
    if not stands_in(queue, times, grant, upto) then take_back(queue, grant) end
    local function set() on('ZADD', times, digits(new), grant) end
    if upto then keeping_distance(times, upto, set) else set() end
    tidy_end(queue, times)
    seen.last = nil
    keep_queue(queue, times)
  end

  -- The waiters of the same client from this position on, up to the first of another client, and so many at most.
  local function those_behind(queue, from, grant, most)
    local numbers = {}
    if most < 1 then return numbers end
    local client = string.match(grant, '^.*:')
    local ids = on('LRANGE', queue, from, from + most - 1)
    for i = 1, #ids do
      if string.sub(ids[i], 1, #client) ~= client then break end
      numbers[i] = tonumber(string.sub(ids[i], #client + 1))
    end
    return numbers
  end

  -- Removes the first waiters while another client holds the lock: the release finds the next waiter.
  local function pop(queue, times, grants)
    local gap = left_behind(queue, times, #grants, grants[#grants])
    on('LTRIM', queue, #grants, -1)
    on('ZREM', times, unpack(grants))
    close_up(times, gap)
    if not seen.last then
      local last = on('LINDEX', queue, -1)
      if last and is_ours(last) then seen.last = last else seen = {} end
      if last and not is_ours(last) then tidy_end(queue, times) end
    elseif seen.last == grants[#grants] then
      -- The queue is empty, and its keys are gone.
      seen.last, seen.is_kept = nil, false
    end
  end

  -- Other data in place of the queue counts as a lost queue.
  local function is_loss(why)
    return string.find(tostring(type(why) == 'table' and why.failed or why), '^WRONGTYPE ')
  end

  -- The head of the queue, as far as the steps from this one on may need it.
  local function first_ones(key, queue)
    local steps_on_it = 1
    while steps_on_it < MOST and KEYS[step + steps_on_it] == key do steps_on_it = steps_on_it + 1 end
    return on('LRANGE', queue, 0, steps_on_it - 1)
  end

  -- The answer to a waiter while the lock is held, or its queue head keeps its position, for so long.
  local function waits_for(left) return -2 - left end

  -- Runs this step and the following ones on the same lock, as long as they only change the queue while another client holds
  -- the lock: new waiters, and waiters that leave from the front. Neither affects the other, so all join with one command and
  -- leave with one. Returns the last of these steps; the others have their replies. `firsts` is the head of the queue, if
  -- known.
  local function come_and_go(key, left, firsts)
    local queue, times = names_of(key)
    local _, holder = held(key)
    local may_leave = holder[2] ~= '0'
    local joins, leaves, leaves_here, is_join, ends, next_at = {}, {}, {}, {}, {}, at
    while KEYS[step + #ends] == key do
      local what, grant = ARGV[next_at], ARGV[next_at + 2]
      if what == 'fair' and not late and ARGV[next_at + 5] == '1' and ARGV[next_at + 6] == '-1' then
        if leaves_here[grant] then break end
        joins[#joins + 1] = grant
      elseif what == 'release_fair' and may_leave and grant ~= holder[1] and ARGV[next_at + 3] == '0' then
        firsts = firsts or first_ones(key, queue)
        if firsts[#leaves + 1] ~= grant then break end
        leaves[#leaves + 1], leaves_here[grant] = grant, true
      else
        break
      end
      ends[#ends + 1] = next_at
      is_join[#ends] = what == 'fair'
      next_at = next_at + 2 + ARGV[next_at + 1]
    end
    -- Joining comes first, so that the queue does not become empty in between.
    local joined = #joins > 0 and attempt(join, queue, times, joins) or waits_for(left)
    local gone = #leaves > 0 and attempt(pop, queue, times, leaves)
    if not gone or is_loss(gone[2]) then gone = 0 end
    for i = 2, #ends do
      filled = filled + 1
      replies[filled] = is_join[i - 1] and joined or gone
      if is_join[i] then acquires = acquires - 1 end
    end
    at, step = ends[#ends], step + #ends - 1
    seen.step = step
    return is_join[#ends] and joined or gone
  end

  function acquire_as.fair(key, grant, lease, tokens, waits, last)
    local left = held(key)
    local queue, times = names_of(key)
    if left == -2 then
      seen = {}
      local first, have_left, kept = front(queue, times, grant)
      if not first or first == grant then
        local behind = those_behind(queue, first and 1 or 0, grant, tokens - 1)
        local token, count = take(tokens, key, lease)
        if first then
          local gap = left_behind(queue, times, 1, grant)
          on('LTRIM', queue, 1, -1)
          on('ZREM', times, grant)
          close_up(times, gap)
          tidy_end(queue, times)
        end
        hold(key, grant, lease)
        return { 'acquired', token, count, unpack(behind) }
      end
      if have_left and kept > 0 then tell(channel_of(key, first)) end
      -- Until the queue head loses its position, unless it asks.
      left = kept
    elseif waits == '1' and last == '-1' and KEYS[step + 1] == key then
      return come_and_go(key, left)
    end
    if waits ~= '1' then return { 'busy', left } end
    if last ~= '-1' then
      stay(queue, times, grant, tonumber(last))
    else
      join(queue, times, { grant })
    end
    return waits_for(left)
  end

  -- The queue head; other data in place of the queue fails no release.
  local function next_of(key)
    local ok, first = pcall(front, names_of(key))
    return ok and first
  end

  -- The channel of a release: that of the queue head, or that of the waiters for the key as a plain lock.
  local function next_channel(key) return channel_of(key, next_of(key)) end

  -- Tells the next waiter of a release; returns the number of receivers. If that waiter is gone, the first one of Redisson is
  -- told, too: it would sleep as long as the lease was, while ours ask soon by themselves.
  local function tell_next(key)
    local first = next_of(key)
    local heard = tell(channel_of(key, first))
    if heard ~= 0 or not first or not is_ours(first) then return heard end
    local waiters = ask('LRANGE', (names_of(key)), 0, 255)
    for _, waiter in ipairs(is_error(waiters) and {} or waiters) do
      if not is_ours(waiter) then
        tell(channel_of(key, waiter))
        break
      end
    end
    return heard
  end

  -- Whether the lock has no holder: it is available, or was released and is still kept for a while.
  local function is_released(key)
    local _, holder = held(key)
    return not holder or holder[2] == '0'
  end

  local function give_up(key, grant)
    local queue, times = names_of(key)
    local firsts = first_ones(key, queue)
    local was_first = firsts[1] == grant
    if was_first and not is_released(key) then return come_and_go(key, held(key), firsts) end
    seen = {}
    local upto = time_of(times, grant)
    local function go() leave(queue, times, grant, upto) end
    if was_first then
      local gap = left_behind(queue, times, 1, grant)
      go()
      close_up(times, gap)
    elseif upto then
      keeping_distance(times, upto, go)
    else
      go()
    end
    local first, _, kept = front(queue, times)
    local last = tidy_end(queue, times)
    local longest = on('ZRANGE', times, -1, -1, 'WITHSCORES')
    if kept == 0 and last and is_ours(last) and tonumber(longest[2] or 0) <= now_ms + PLACE then
      -- There may be no waiter behind so many that have left. A waiter of dlock asks before these are gone, and with such
      -- times none of them is Redisson's.
      on('PEXPIRE', queue, 2 * PLACE)
      on('PEXPIRE', times, 2 * PLACE)
    end
    -- The release was published before, also if the lock is kept for a while.
    if was_first and first and is_released(key) then tell(channel_of(key, first)) end
    return 0
  end

  function steps.release_fair(key, grant, keep)
    if keep ~= '0' then
      seen = {}
      return others('keep').keep(key, grant, keep, next_channel(key))
    end
    local holder = seen_of(key).holder
    local is_waiter = holder and holder[1] ~= grant
    if not is_waiter then
      seen = {}
      local gone = ask('HDEL', key, grant)
      if gone == 1 then return released(tell_next(key)) end
      if is_error(gone) and not is_wrong_type(gone) then error({ failed = gone.err }) end
    end
    local done, answer = pcall(give_up, key, grant)
    if done then return answer end
    -- A refused command has changed nothing.
    if is_waiter and not is_loss(answer) then error(answer) end
    return 0
  end

  function told_by_force(key)
    local first = next_of(key)
    if first then tell(channel_of(key, first)) end
  end
end
