-- The rarer steps on locks, and what the other kinds need for theirs.

-- Lua prints large numbers as 1.79e+15.
local function digits(number) return string.format('%.0f', number) end

-- What stands in the way there, as far as this user may know.
local function type_of(key)
  local found = ask('TYPE', key)
  return type(found) == 'table' and found.ok or 'unknown'
end

-- A holder: the UUID of its client and a number, which Redisson's reactive and asynchronous calls draw below zero, too.
local function is_holder(text) return string.find(text, '^%x+%-%x+%-%x+%-%x+%-%x+:%-?%d+$') end

-- A grant of dlock, by the version of its client's UUID.
local function is_ours(id) return string.find(id, '^%x+%-%x+%-8%x%x%x%-') end

-- How a read-write lock is held, if the key is one.
local function mode_of(key)
  local mode = ask('HGET', key, 'mode')
  return (mode == 'read' or mode == 'write') and mode or nil
end

-- The one field of a plain lock and its value, nil if the key is free. Ends the step where there is
-- something else: a string, or a hash as that of a read-write lock, which has its mode besides.
local function holder_of(key)
  local fields = ask('HLEN', key)
  if fields == 0 then return nil end
  if is_wrong_type(fields) then error({ taken = type_of(key) }) end
  if is_error(fields) then error({ failed = fields.err }) end
  local holder = fields == 1 and run('HGETALL', key)
  if not holder or not is_holder(holder[1]) or not string.find(holder[2], '^%d+$') or #holder[2] > 15 then
    error({ taken = mode_of(key) and 'read-write lock' or 'hash' })
  end
  return holder
end

-- What stands beside a key, as Redisson calls it: in the same slot.
local function has_tag(key) return string.find(key, '{', 1, true) end
local function prefixed(prefix, key) return prefix .. ':' .. (has_tag(key) and key or '{' .. key .. '}') end
local function suffixed(key, suffix) return (has_tag(key) and key or '{' .. key .. '}') .. ':' .. suffix end

-- The whole number that a key holds, nil if nothing. Ends the step where there is something else.
local function number_at(key)
  -- The last fencing token is no counter of a user.
  if string.find(key, 'dlock:fence$') or string.find(key, 'dlock:fence:{%d+}') then error({ taken = 'string' }) end
  local text = ask('GET', key)
  if is_wrong_type(text) then error({ taken = type_of(key) }) end
  if is_error(text) then error({ failed = text.err }) end
  if not text then return nil end
  if not string.find(text, '^%-?%d+$') or #text > 16 then error({ taken = 'string that is no count' }) end
  return tonumber(text)
end

-- Leaves nothing of a lock whose lease could not be set, or that was acquired beside one that is busy. A user that may
-- remove nothing may still write over it, as over the fence.
local function undo(key, grant, reply)
  if is_error(ask('HDEL', key, grant)) and is_error(ask('DEL', key)) then ask('SET', key, '', 'PX', 1) end
  return { 'failed', reply and tostring(reply.err) }
end

-- Makes the hash of a lock that is free; where its lease cannot be set, nothing stays.
local function hold(key, grant, lease)
  run('HSET', key, grant, '1')
  local set = ask('PEXPIRE', key, lease)
  if set ~= 1 then
    undo(key, grant)
    error({ failed = set.err })
  end
end

-- Lets a key go after so many ms at the latest; how many it has left. A copy of a release that comes late prolongs
-- nothing so. It is a write in any case: a server that is full refuses what needs memory only until a call has written,
-- and a full server must accept releases.
local function shorten(key, keep)
  local left = run('PTTL', key)
  keep = tonumber(keep)
  left = (left < 0 or left > keep) and keep or math.max(left, 1)
  run('PEXPIRE', key, left)
  return left
end

-- The steps that run.lua does not have itself; and those that acquire a lock of another kind than the plain one: they
-- count as acquires, and refuse themselves when they are late.
local steps, acquire_as = {}, {}
-- Makes those that a step needs.
local others
-- Of kinds with data of their own: what is answered to an inspection, and to a release by force; nil where the
-- key does not hold theirs.
local inspect_as, force_as = {}, {}

local function first_of(all, key)
  for _, step in ipairs(all) do
    local answer = step(key)
    if answer then return answer end
  end
end
-- Tells the waiters in a queue that their lock was released by force.
local told_by_force

local function add_lock_steps()
  -- grant, ms to keep the key taken yet, channel
  function steps.keep(key, grant, keep, channel)
    local holds = ask('HEXISTS', key, grant)
    -- Other data in its place is a loss like any other.
    if holds == 0 or is_wrong_type(holds) then return 0 end
    if is_error(holds) then error({ failed = holds.err }) end
    shorten(key, keep)
    -- A renewal that was on its way prolongs nothing either.
    run('HSET', key, grant, '0')
    return released(tell(channel))
  end

  function steps.inspect(key)
    local answer = first_of(inspect_as, key)
    if answer then return answer end
    local holder = holder_of(key)
    if not holder then return { 'free' } end
    return { 'holders', 'lock', holder[1], holder[2], run('PTTL', key) }
  end

  -- channel, refuse after this server time in µs, the only holder that it may have, if that matters
  function steps.force(key, channel, refuse_after, only)
    if now > tonumber(refuse_after) then return { 'late' } end
    if only then
      local found = steps.inspect(key)
      local is_there
      for at = 3, #found, 4 do is_there = is_there or found[at] == only end
      if not is_there then return { 'gone' } end
      if #found > 5 then return { 'failed', 'it has other holders' } end
    end
    local answer = first_of(force_as, key)
    if answer then return answer end
    if not holder_of(key) then return { 'gone' } end
    run('DEL', key)
    told_by_force(key)
    return { 'released', tell(channel) }
  end
end
