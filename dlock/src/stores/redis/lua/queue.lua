-- The short call of steps on a fair lock that is held: waiters join and leave, and the holder may release it at the end. It
-- does what fair.lua does, in the common cases; the rare ones are left to the long form.

if short == 'queue' then
  local key, queue, times = KEYS[2], KEYS[3], KEYS[4]
  local late, client, lease, tokens, waits, last_ms = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
  -- As in fair.lua, in ms. Here RESIDUE is not set anew within a minute.
  local PLACE, RESIDUE, MINUTE = 5000, 3600000, 60000
  -- A break leads to the long form; nothing was changed before it.
  repeat
    local holder = type(left) == 'number' and left ~= -2 and ask('HGETALL', key) or {}
    if #holder ~= 2 or holder[2] ~= '1' or not string.find(holder[1], '^%x+%-%x+%-%x+%-%x+%-%x+:%-?%d+$') then break end
    -- The waiters that join; those that leave, from the front; and whether the lock is released at the end.
    local joins, leaves, leaves_here, is_released, is_rare = {}, {}, {}, false, false
    for i = 9, #ARGV, 2 do
      local grant = client .. ARGV[i + 1]
      is_rare = is_rare or is_released or leaves_here[grant]
      if ARGV[i] == 'fair' then
        joins[#joins + 1] = grant
      elseif grant == holder[1] then
        is_released = true
      else
        leaves[#leaves + 1], leaves_here[grant] = grant, true
      end
    end
    local now_ms = math.floor(now / 1000)
    local upto, is_kept
    if joins[1] then
      upto = string.format('%.0f', now_ms + PLACE)
      local longer = ask('ZRANGE', times, '(' .. upto, '+inf', 'BYSCORE', 'LIMIT', '0', '1')
      local queue_left, times_left = ask('PTTL', queue), ask('PTTL', times)
      is_rare = is_rare or longer.err or longer[1] or now > late + 0 or waits ~= '1' or last_ms ~= '-1'
        or type(queue_left) ~= 'number' or type(times_left) ~= 'number'
      is_kept = not is_rare and math.min(queue_left, times_left) > RESIDUE - MINUTE
    elseif leaves[1] then
      local last = ask('LINDEX', queue, '-1')
      is_rare = is_rare or type(last) ~= 'string' or not string.find(last, '^%x+%-%x+%-8%x%x%x%-')
    end
    -- The waiter that is notified of the release.
    local next_one = joins[1]
    if is_released or leaves[1] then
      local waiters = ask('LRANGE', queue, '0', #leaves)
      for i = 1, #leaves do is_rare = is_rare or waiters[i] ~= leaves[i] end
      next_one = waiters[#leaves + 1] or next_one
      -- One of Redisson's right behind gets what is left of their time, in fair.lua.
      is_rare = is_rare or leaves[1] and waiters[#leaves + 1]
        and not string.find(waiters[#leaves + 1], '^%x+%-%x+%-8%x%x%x%-')
      if is_released and waiters[#leaves + 1] then
        local its = ask('ZSCORE', times, next_one)
        is_rare = is_rare or type(its) ~= 'string' or its + 0 <= now_ms or its % 1 ~= 0
      end
      is_rare = is_rare or waiters.err
    end
    if is_rare then break end

    local joined, gone = -2 - left, 0
    if joins[1] then
      if type(ask('RPUSH', queue, unpack(joins))) ~= 'number' then break end
      local entries = {}
      for i = 1, #joins do entries[2 * i - 1], entries[2 * i] = upto, joins[i] end
      local added = ask('ZADD', times, unpack(entries))
      if type(added) ~= 'number' then joined = { 'failed', added.err .. ' (' .. times .. ')' } end
      if not is_kept then
        local set = ask('PEXPIRE', queue, RESIDUE)
        if set == 1 then set = ask('PEXPIRE', times, RESIDUE) end
        if type(set) == 'table' then joined = { 'failed', set.err .. ' (' .. queue .. ')' } end
      end
    end
    if leaves[1] then
      local trimmed, removed = ask('LTRIM', queue, #leaves, '-1'), ask('ZREM', times, unpack(leaves))
      local err = trimmed.err or type(removed) == 'table' and removed.err
      if err then gone = { 'failed', err .. ' (' .. queue .. ')' } end
    end
    local replies = { now }
    for i = 9, #ARGV, 2 do replies[#replies + 1] = ARGV[i] == 'fair' and joined or gone end
    if is_released then
      local done = ask('HDEL', key, holder[1])
      local heard = done == 1 and ask('PUBLISH', next_one and ARGV[8] .. ':' .. next_one or ARGV[8], '0')
      if heard == 0 and next_one then
        -- It is gone. As in fair.lua, the first waiter of Redisson is told, too.
        local waiters = ask('LRANGE', queue, '0', '255')
        for i = 1, #waiters do
          if not string.find(waiters[i], '^%x+%-%x+%-8%x%x%x%-') then
            ask('PUBLISH', ARGV[8] .. ':' .. waiters[i], '0')
            break
          end
        end
      end
      replies[#replies] = done ~= 1 and { 'failed', tostring(done.err) } or type(heard) == 'number' and 1 + heard or -1
    end
    return replies
  until true

  local acquires, steps, keys = 0, { late, 0, 0, '0' }, { KEYS[1] }
  for i = 9, #ARGV, 2 do
    local at, grant = #steps, client .. ARGV[i + 1]
    keys[#keys + 1], steps[at + 1] = key, ARGV[i]
    if ARGV[i] == 'fair' then
      acquires = acquires + 1
      steps[at + 2], steps[at + 3], steps[at + 4], steps[at + 5] = '5', grant, lease, tokens
      steps[at + 6], steps[at + 7] = waits, last_ms
    else
      steps[at + 2], steps[at + 3], steps[at + 4] = '2', grant, '0'
    end
  end
  steps[2], steps[3] = acquires, acquires * tokens
  KEYS, ARGV = keys, steps
end
