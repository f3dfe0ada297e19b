-- Steps on locks and on records, several in one call. Each step is atomic by itself and harms no other:
-- whatever goes wrong with it is its own answer. run.lua takes them all in turn and has the three steps that
-- are most of the work; the rarer ones on locks stand here, those on records in records.lua, those of each
-- further kind of lock in a file of that name, those on several locks at once in several.lua. All files are one
-- script.
--
-- KEYS[1]      the fence of this server, or of this slot of a Cluster: the last fencing token that was given. In a
--              Cluster, where no step gives a token, the key of the first step again
-- KEYS[1 + i]  the lock or record of step i
-- ARGV[1]      the server time in µs after which acquires refuse themselves
-- ARGV[2]      how many acquires there are
-- ARGV[3]      how many fencing tokens they want in all
-- ARGV[4...]   for each step its name and its arguments:
--                acquire GRANT LEASE-ms TOKENS | release GRANT KEEP-ms CHANNEL |
--                renew LEASE-ms COUNT GRANT... (it has as many keys as grants) | all, see several.lua
--                any other: the number of its arguments, its arguments
--
-- Reply: { server time in µs, answer of step 1, answer of step 2, ... }. Common answers are numbers:
--   acquire  two: the first fencing token, how many there are; or one: -2 - PTTL when the lock is busy
--   renew    1 all are renewed; or { 'others', PLACE, 0 (gone) or MESSAGE (not done), ... } for those that
--            are not, places counted from 1
--   release  0 gone; released: 1 + how many heard of it, -1 where it may not be told
-- Releases and renewals of other kinds answer in numbers likewise. All others are arrays whose first element says
-- what they are:
--   acquired FIRST COUNT | busy PTTL | late | released HEARD | gone |
--   holders KIND ID COUNT PTTL, for each of them | free |
--   taken TYPE (the key holds other data) | failed MESSAGE (nothing was changed)
--
-- Data, as Redisson 4.7 has them: HASH name { holder -> holds }, its TTL is the lease. Here a holder is the
-- id of a grant and its count is always 1; 0 for one that was released and keeps its key for a while yet.
--
-- A command costs a fifth of a microsecond or more, as do a call of string.format and a number that becomes
-- text: the steps of run.lua do without what they can.

local KEYS, ARGV, ask = KEYS, ARGV, redis.pcall
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local fence = KEYS[1]
local in_cluster = fence ~= 'dlock:fence'

-- Lua prints large numbers as 1.79e+15.
local function digits(number) return string.format('%.0f', number) end

local function is_error(reply) return type(reply) == 'table' and reply.err end

local function is_wrong_type(reply) return is_error(reply) and string.find(reply.err, 'WRONGTYPE', 1, true) end

-- Runs a command; a failure ends the step.
local function run(...)
  local reply = ask(...)
  if is_error(reply) then error({ failed = reply.err }) end
  return reply
end

-- Takes a step that may be ended by an error, and gives its answer.
local function attempt(step, ...)
  local ok, reply = pcall(step, ...)
  if ok then return reply end
  if type(reply) ~= 'table' then return { 'failed', tostring(reply) } end
  if reply.taken then return { 'taken', reply.taken } end
  return { 'failed', tostring(reply.failed or reply.err) }
end

-- What stands in the way there, as far as this user may know.
local function type_of(key)
  local found = ask('TYPE', key)
  return type(found) == 'table' and found.ok or 'unknown'
end

local function is_holder(text) return string.find(text, '^%x+%-%x+%-%x+%-%x+%-%x+:%d+$') end

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

-- Whether a channel may be in another slot than the key whose news it has: it is in that one if it has the braces of
-- the key alone, or none.
local function is_apart(channel)
  return string.find(channel, '[{}]') and not string.find(channel, '^[^{}]*{[^{}]+}[^{}]*$')
end

-- Messages are for others; a channel that may not be used fails no release. Says how many heard of it, or -1.
-- In a Cluster all listen to sharded channels, on the server that has the slot, as Redisson does. The plain way is left
-- for channels that are elsewhere, and for servers before 7, which know no sharded ones.
local function tell(channel, message)
  message = message or '0'
  local heard = in_cluster and ask('SPUBLISH', channel, message)
  local failed = is_error(heard)
  local is_old = failed and string.find(failed, 'nknown', 1, true)
  if not heard or is_old or (failed or heard == 0) and is_apart(channel) then
    heard = ask('PUBLISH', channel, message)
  end
  return is_error(heard) and -1 or heard
end

-- What stands beside a key, as Redisson calls it: in the same slot.
local function has_tag(key) return string.find(key, '{', 1, true) end
local function prefixed(prefix, key) return prefix .. ':' .. (has_tag(key) and key or '{' .. key .. '}') end
local function suffixed(key, suffix) return (has_tag(key) and key or '{' .. key .. '}') .. ':' .. suffix end

-- The whole number that a key holds, nil if nothing. Ends the step where there is something else.
local function number_at(key)
  -- The last fencing token is no count of anybody's.
  if string.find(key, '^dlock:fence') then error({ taken = 'string' }) end
  local text = ask('GET', key)
  if is_wrong_type(text) then error({ taken = type_of(key) }) end
  if is_error(text) then error({ failed = text.err }) end
  if not text then return nil end
  if not string.find(text, '^%-?%d+$') or #text > 16 then error({ taken = 'string that is no count' }) end
  return tonumber(text)
end

-- The answer to a release.
local function released(heard) return heard < 0 and -1 or 1 + heard end

local function last_token()
  local last = ask('GET', fence)
  if is_error(last) then error({ failed = fence .. ': ' .. last.err }) end
  return tonumber(last or 0) or error({ failed = fence .. ' does not hold a fencing token' })
end

-- As `lease` could not be set, or another lock not be had: nothing stays.
local function undo(key, grant, reply)
  if is_error(ask('HDEL', key, grant)) then ask('DEL', key) end
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

-- The steps that run.lua does not have itself, when one of them comes; and those that acquire a lock of
-- another kind than the plain one: they count as acquires, and refuse themselves when they are late.
local steps
local acquire_as = {}
-- Acquires from the present one on, the present one not counted any more.
local acquires = tonumber(ARGV[2])
-- The next fencing token, and the last of those that were reserved for the acquires of this call.
local token, last
-- Whether this server, as a member of a quorum, has no say in the acquire that comes next.
local abstains = false
-- (wanted, key, lease in ms): fencing tokens for one of these, once nothing can fail any more; the first, and
-- how many. Answer with { 'acquired', first, count }.
local take
-- Of kinds with data of their own: what is answered to an inspection, and to a release by force; nil where the
-- key does not hold theirs.
local inspect_as, force_as = {}, {}

local function first_of(all, key)
  for _, step in ipairs(all) do
    local answer = step(key)
    if answer then return answer end
  end
end
-- Tells those who wait in a queue that their lock was opened by force.
local told_by_force

local function add_lock_steps()
  -- grant, ms to keep the key taken yet, channel
  function steps.keep(key, grant, keep, channel)
    local holds = ask('HEXISTS', key, grant)
    -- Other data in its place is a loss like any other.
    if holds == 0 or is_wrong_type(holds) then return 0 end
    if is_error(holds) then error({ failed = holds.err }) end
    -- A copy that comes late prolongs nothing, and neither does a renewal that was on its way.
    if run('PTTL', key) > tonumber(keep) then run('PEXPIRE', key, keep) end
    ask('HSET', key, grant, '0')
    return released(tell(channel))
  end

  function steps.inspect(key)
    local answer = first_of(inspect_as, key)
    if answer then return answer end
    local holder = holder_of(key)
    if not holder then return { 'free' } end
    return { 'holders', 'lock', holder[1], holder[2], run('PTTL', key) }
  end

  -- channel, refuse after this server time in µs
  function steps.force(key, channel, refuse_after)
    if now > tonumber(refuse_after) then return { 'late' } end
    local answer = first_of(force_as, key)
    if answer then return answer end
    if not holder_of(key) then return { 'gone' } end
    run('DEL', key)
    told_by_force(key)
    return { 'released', tell(channel) }
  end
end
