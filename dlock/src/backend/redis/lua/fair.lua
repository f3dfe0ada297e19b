-- Steps on fair locks: who waits has a place in a queue, and is served in its order.
--
-- KEYS, ARGV and the reply to the whole call: see always.lua. The steps:
--   fair GRANT LEASE-ms TOKENS WAITS LAST-ms   an acquire; WAITS is 1 for one that takes a place where it is busy, LAST
--                                              for how long this id has not asked, -1 where it never did. Where there
--                                              are tokens for more than one, `acquired` is followed by the numbers of
--                                              those of the same client who are next
--   release_fair GRANT KEEP-ms                 as release; gives up a place, too, which answers 0
-- Of a lock that is free and others are waiting for, `busy` tells when the one in front counts as gone.
--
-- Data, as Redisson 4.7 has them: the hash of the plain lock, and
--   LIST redisson_lock_queue:{name}     who waits
--   ZSET redisson_lock_timeout:{name}   until when each of them keeps its place, in ms of the epoch: once it is in front
--                                       after that it counts as gone
-- Channel: redisson_lock__channel:{name}:ID of the one in front, with 0 when the lock comes free.
--
-- One of ours keeps its place for PLACE unless it asks again. One of Redisson's has all its patience (300 s by default,
-- or the time that it waits) from the time of the one before it on; when it gets the lock or gives up, it takes its
-- patience off the times of all others, or of those behind. So ours have on top of PLACE the patience of all of
-- Redisson's before them, and those of Redisson right behind one of ours are moved along with it.

local function add_fair_steps()
  local PLACE = 5000
  -- When the keys of a queue go in which nobody of ours has been heard of for so long, in ms.
  local RESIDUE = 3600000
  local now_ms = math.floor(now / 1000)

  local function names_of(key)
    return prefixed('redisson_lock_queue', key), prefixed('redisson_lock_timeout', key)
  end

  local function channel_of(key, id)
    local channel = prefixed('redisson_lock__channel', key)
    return id and channel .. ':' .. id or channel
  end

  -- Runs a command on one of the two keys; where that holds other data, it is named.
  local function on(command, key, ...)
    local reply = ask(command, key, ...)
    if is_error(reply) then error({ failed = key .. ': ' .. reply.err }) end
    return reply
  end

  local function leave(queue, times, id)
    on('LREM', queue, 0, id)
    on('ZREM', times, id)
  end

  -- Who is in front, after those have left who count as gone: its id, whether anybody left, and until when it keeps
  -- its place. Who asks is there.
  local function front(queue, times, asker)
    local have_left = false
    while true do
      local id = on('LINDEX', queue, 0)
      if not id then return nil, have_left end
      local upto = id ~= asker and on('ZSCORE', times, id)
      if id == asker or upto and tonumber(upto) > now_ms then return id, have_left, tonumber(upto or 0) end
      leave(queue, times, id)
      have_left = true
    end
  end

  -- Somebody of ours has left the queue. Those of Redisson who stay do not set anew when its keys go.
  local function left_behind(queue, times)
    local last = on('LINDEX', queue, -1)
    if last and not is_ours(last) then
      on('PERSIST', queue)
      on('PERSIST', times)
    end
  end

  -- Whether one of Redisson's may be waiting: it has more patience than ours have.
  local function are_mixed(times) return on('ZCOUNT', times, digits(now_ms + PLACE + 1), '+inf') > 0 end

  -- All who wait and their times; where one of them is.
  local function all_of(queue, times, id)
    local ids, upto, at = on('LRANGE', queue, 0, -1), {}, nil
    for i, other in ipairs(ids) do
      upto[other] = tonumber(on('ZSCORE', times, other) or nil)
      if other == id then at = i end
    end
    return ids, upto, at
  end

  -- Moves those of Redisson who are right behind.
  local function move_along(times, ids, upto, at, by)
    for i = at + 1, #ids do
      local id = ids[i]
      if is_ours(id) then return end
      if upto[id] then on('ZADD', times, digits(upto[id] + by), id) end
    end
  end

  -- Until when a place is kept that was asked for so long ago, or never.
  local function time_of(queue, times, grant, last)
    if not are_mixed(times) then return now_ms + PLACE end
    local ids, upto, at = all_of(queue, times, grant)
    local before, theirs, patience = now_ms, false, 0
    for i = 1, (at or #ids + 1) - 1 do
      local id = ids[i]
      if not is_ours(id) then
        theirs = true
        patience = patience + math.max(0, (upto[id] or before) - before)
      end
      before = upto[id] or before
    end
    if not theirs then
      patience = 0
    elseif at and upto[grant] and last >= 0 then
      -- The patience of the first of them does not show any more. What all have was known when this one came, and
      -- whoever left since took it off.
      patience = math.max(0, upto[grant] - PLACE - (now_ms - last))
    end
    local new = now_ms + PLACE + patience
    if at and upto[grant] then move_along(times, ids, upto, at, new - upto[grant]) end
    return new
  end

  -- The place of one who was not heard of for too long: before all who came after it. Those before it have left it as
  -- it has, unless they are back: of its own client, those who came before it are known.
  local function take_back(queue, grant)
    local client, number = string.match(grant, '^(.*):(%d+)$')
    local ids, earlier = on('LRANGE', queue, 0, -1), nil
    for _, id in ipairs(ids) do
      local other, its = string.match(id, '^(.*):(%d+)$')
      if other == client and tonumber(its) < tonumber(number) then earlier = id end
    end
    if earlier then
      on('LINSERT', queue, 'AFTER', earlier, grant)
    elseif ids[1] then
      on('LINSERT', queue, 'BEFORE', ids[1], grant)
    else
      on('RPUSH', queue, grant)
    end
  end

  local function wait(queue, times, grant, last)
    local new = time_of(queue, times, grant, last)
    if last < 0 then
      on('RPUSH', queue, grant)
    elseif not on('LPOS', queue, grant) then
      take_back(queue, grant)
    end
    on('ZADD', times, digits(new), grant)
    on('PEXPIRE', queue, RESIDUE)
    on('PEXPIRE', times, RESIDUE)
  end

  -- Those of the same client who are in front from this place on, up to the first of somebody else, and so many at most.
  local function those_behind(queue, from, grant, most)
    local numbers = {}
    if most < 1 then return numbers end
    local client = string.match(grant, '^.*:')
    for _, id in ipairs(on('LRANGE', queue, from, from + most - 1)) do
      local other, number = string.match(id, '^(.*:)(%d+)$')
      if other ~= client then break end
      table.insert(numbers, tonumber(number))
    end
    return numbers
  end

  function acquire_as.fair(key, grant, lease, tokens, waits, last)
    local left = run('PTTL', key)
    -- It may have ended since its time was asked for.
    if left ~= -2 and not holder_of(key) then left = -2 end
    local queue, times = names_of(key)
    local first, have_left, upto = front(queue, times, grant)
    if left == -2 and (not first or first == grant) then
      local behind = those_behind(queue, first and 1 or 0, grant, tokens - 1)
      local token, count = take(tokens, key, lease)
      if first then
        leave(queue, times, grant)
        left_behind(queue, times)
      end
      hold(key, grant, lease)
      return { 'acquired', token, count, unpack(behind) }
    end
    if left == -2 and have_left then tell(channel_of(key, first)) end
    if waits == '1' then wait(queue, times, grant, tonumber(last)) end
    return { 'busy', left == -2 and upto - now_ms or left }
  end

  -- The one in front; other data in place of the queue fails no release.
  local function next_of(key)
    local ok, first = pcall(front, names_of(key))
    return ok and first
  end

  -- Where the release of a lock is told: to the one in front, or to those who wait for the key as a plain lock.
  local function next_channel(key) return channel_of(key, next_of(key)) end

  local function give_up(key, grant)
    local queue, times = names_of(key)
    local was_first = on('LINDEX', queue, 0) == grant
    if not was_first and are_mixed(times) then
      local ids, upto, at = all_of(queue, times, grant)
      local before = at and upto[ids[at - 1]]
      if before and upto[grant] then move_along(times, ids, upto, at, before - upto[grant]) end
    end
    leave(queue, times, grant)
    left_behind(queue, times)
    -- It was told already that the lock is free.
    local first = was_first and run('PTTL', key) == -2 and next_of(key)
    if first then tell(channel_of(key, first)) end
  end

  function steps.release_fair(key, grant, keep)
    if keep ~= '0' then return steps.keep(key, grant, keep, next_channel(key)) end
    local gone = ask('HDEL', key, grant)
    if gone == 1 then return released(tell(next_channel(key))) end
    if is_error(gone) and not is_wrong_type(gone) then error({ failed = gone.err }) end
    pcall(give_up, key, grant)
    return 0
  end

  function told_by_force(key)
    local first = next_of(key)
    if first then tell(channel_of(key, first)) end
  end
end
