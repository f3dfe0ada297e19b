-- Steps on locks, several in one call. Each step is atomic by itself and harms no other: whatever goes
-- wrong with it is its own answer. records.lua has the steps on records, run.lua takes them all in turn: the
-- three are one script.
--
-- KEYS[1]      the fence of this server: the last fencing token that was given
-- KEYS[1 + i]  the lock or record of step i
-- ARGV         for each step: its name, the number of its arguments, its arguments
--
-- Reply: { server time in µs, answer of step 1, answer of step 2, ... }; an answer is an array whose first
-- element says what it is:
--   acquired FIRST LAST | busy PTTL | late | released HEARD | gone | renewed | holder ID COUNT PTTL | free |
--   taken TYPE (the key holds other data) | failed MESSAGE (nothing was changed)
--
-- Data, as Redisson 4.7 has them: HASH name { holder -> holds }, its TTL is the lease. Here a holder is the
-- id of a grant and its count is always 1; 0 for one that was released and keeps its key for a while yet.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local fence = KEYS[1]

-- Lua prints large numbers as 1.79e+15.
local function digits(number) return string.format('%.0f', number) end

-- Runs a command; a failure ends the step.
local function run(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then error({ failed = reply.err }) end
  return reply
end

local function type_of(key)
  local found = run('TYPE', key)
  return type(found) == 'table' and found.ok or found
end

-- Ends the step unless the key is a lock or free; says which.
local function is_lock(key)
  local found = type_of(key)
  if found == 'none' then return false end
  if found ~= 'hash' then error({ taken = found }) end
  return true
end

-- The one field of a plain lock and its value. Ends the step where the hash is something else, as a
-- read-write lock is, which has its mode besides.
local function holder_of(key)
  local holder = run('HLEN', key) == 1 and run('HGETALL', key)
  if not holder
    or not string.find(holder[1], '^%x+%-%x+%-%x+%-%x+%-%x+:%d+$')
    or not string.find(holder[2], '^%d+$') or #holder[2] > 15 then
    error({ taken = 'hash' })
  end
  return holder
end

-- Messages are for others; a channel that may not be used fails no release. Says how many heard of it.
local function tell(channel)
  local reply = redis.pcall('PUBLISH', channel, '0')
  return type(reply) == 'number' and reply or -1
end

local function last_token()
  local last = redis.pcall('GET', fence)
  if type(last) == 'table' then error({ failed = fence .. ': ' .. tostring(last.err) }) end
  return tonumber(last or 0) or error({ failed = fence .. ' does not hold a fencing token' })
end

local steps = {}

-- grant, lease in ms, refuse after this server time in µs, number of fencing tokens
function steps.acquire(key, grant, lease, refuse_after, tokens)
  if now > tonumber(refuse_after) then return { 'late' } end
  if is_lock(key) then
    holder_of(key)
    return { 'busy', run('PTTL', key) }
  end
  -- Tokens reach back, so that they never outrun the clock: after a flush the clock alone must be ahead
  -- of every token ever given.
  local least = last_token() + 1
  local last = math.max(now, least)
  local first = math.max(least, last - tonumber(tokens) + 1)
  run('SET', fence, digits(last))
  run('HSET', key, grant, 1)
  local reply = redis.pcall('PEXPIRE', key, lease)
  if type(reply) == 'table' and reply.err then
    redis.pcall('HDEL', key, grant)
    error({ failed = reply.err })
  end
  return { 'acquired', digits(first), digits(last) }
end

-- grant, ms to keep the key taken yet, channel
function steps.release(key, grant, keep, channel)
  -- Other data in its place is a loss like any other.
  if type_of(key) ~= 'hash' or run('HEXISTS', key, grant) == 0 then return { 'gone' } end
  if tonumber(keep) > 0 then
    -- A copy that comes late prolongs nothing, and neither does a renewal that was on its way.
    if run('PTTL', key) > tonumber(keep) then run('PEXPIRE', key, keep) end
    redis.pcall('HSET', key, grant, 0)
  else
    run('HDEL', key, grant)
  end
  return { 'released', tell(channel) }
end

-- grant, lease in ms
function steps.renew(key, grant, lease)
  if type_of(key) ~= 'hash' or run('HGET', key, grant) ~= '1' then return { 'gone' } end
  run('PEXPIRE', key, lease)
  return { 'renewed' }
end

function steps.inspect(key)
  if not is_lock(key) then return { 'free' } end
  local holder = holder_of(key)
  return { 'holder', holder[1], holder[2], run('PTTL', key) }
end

-- channel, refuse after this server time in µs
function steps.force(key, channel, refuse_after)
  if now > tonumber(refuse_after) then return { 'late' } end
  if not is_lock(key) then return { 'gone' } end
  holder_of(key)
  run('DEL', key)
  return { 'released', tell(channel) }
end
