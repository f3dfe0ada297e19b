-- Steps on locks and on records, several in one call. Each step is atomic by itself and harms no other:
-- whatever goes wrong with it is its own answer. All files are one script:
--   always.lua   what every call needs
--   steps.lua    what others need, and the rarer steps on locks; those on records are in records.lua, those of each
--                further kind of lock in a file of that name, those on several locks at once in several.lua
--   rare.lua     the end of what is made only in a call that needs it: all from steps.lua on is one function
--   run.lua      takes the steps in turn, and has the three that are most of the work
--
-- KEYS[1]      the fence of this prefix, in a Cluster of this slot: the last fencing token that was given. In a
--              Cluster, where no step gives a token, the key of the first step again
-- KEYS[1 + i]  the lock or record of step i
-- ARGV[1]      the server time in µs after which acquires refuse themselves
-- ARGV[2]      how many acquires there are
-- ARGV[3]      how many fencing tokens they want in all
-- ARGV[4]      1 in a Cluster, else 0
-- ARGV[5...]   for each step its name and its arguments:
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
--   acquired FIRST COUNT | busy PTTL [AGAIN-ms or -1 [LISTENERS]] | late | released HEARD | gone |
--   holders KIND ID COUNT PTTL, for each of them | free |
--   taken TYPE (the key holds other data) | failed MESSAGE (nothing was changed)
--
-- Data, as Redisson 4.7 has them: HASH name { holder -> holds }, its TTL is the lease. Here a holder is the
-- id of a grant and its count is always 1; 0 for one that was released and keeps its key for a while yet.
--
-- A command costs a fifth of a microsecond or more, as do a call of string.format, a number that becomes text, and a
-- function that is made; a server that was asleep takes several times as long for all of them. So run.lua does without
-- what it can.

local KEYS, ARGV, ask = KEYS, ARGV, redis.pcall
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local fence = KEYS[1]
local in_cluster = ARGV[4] == '1'

-- Acquires from the present one on, the present one not counted any more.
local acquires = tonumber(ARGV[2])
-- The next fencing token, and the last of those that were reserved for the acquires of this call.
local token, last
-- Whether this server, as a member of a quorum, has no say in the acquire that comes next.
local abstains = false

local function is_error(reply) return type(reply) == 'table' and reply.err end

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

-- Messages are for others; a channel that may not be used fails no release. Says how many heard of it, or -1.
-- In a Cluster all listen to sharded channels, on the server that has the slot, as Redisson does. The plain way is left
-- for servers before 7, which know no sharded ones, and for channels that may be elsewhere: one is in the slot of its key
-- if it has the braces of the key alone, or none.
local function tell(channel, message)
  message = message or '0'
  local heard = in_cluster and ask('SPUBLISH', channel, message)
  local failed = is_error(heard)
  local is_old = failed and string.find(failed, 'nknown', 1, true)
  local is_apart = (failed or heard == 0) and string.find(channel, '[{}]')
    and not string.find(channel, '^[^{}]*{[^{}]+}[^{}]*$')
  if not heard or is_old or is_apart then
    heard = ask('PUBLISH', channel, message)
  end
  return is_error(heard) and -1 or heard
end

-- The answer to a release.
local function released(heard) return heard < 0 and -1 or 1 + heard end

-- Moves the last fencing token on, for so many acquires besides one: the least token that is free from then on, and the
-- last one. What is no token, or too large for one, is as good as lost: the clock is ahead of all that were given, and
-- whoever wrote it shall stop nobody. From 2^53 on Lua counts no more: there nobody may begin anew but who knows what that
-- does.
local function move_fence(besides)
  local before = ask('GET', fence)
  if is_error(before) then
    error({ failed = fence .. ', the key of the fencing tokens, holds other data, to be removed: ' .. before.err })
  end
  before = tonumber(before or 0)
  local known = before and before > 0 and before < 9007199254740992 and before % 1 == 0
  local least = known and before + 1 or now
  local upto = math.max(now, least + besides)
  if upto >= 9007199254740992 then
    error({ failed = fence .. ' has come to the last of all fencing tokens: remove this key, and they begin again with '
      .. "the server's clock, below those that were given" })
  end
  run('SET', fence, string.format('%.0f', upto))
  return least, upto
end

-- Reserves the tokens of all acquires with one write. They reach back, so that they never outrun the clock:
-- after a flush the clock alone must be ahead of every token ever given. Where there is no last token, it may
-- have been flushed a moment ago, so nothing reaches back and each acquire has one. They reach back by REACH
-- at the most, in µs: a replica that takes over knows an older last token, and takes longer than that.
local REACH = 5000
local function reserve(key, lease)
  -- The present one is not counted any more.
  local least, upto = move_fence(acquires)
  -- A hash whose user may not let it expire must not come to be. There is none yet, so this changes nothing.
  if key then run('PEXPIRE', key, lease) end
  last = upto
  token = math.max(least, upto - math.min(ARGV[3], REACH) + 1)
end

-- (wanted, key, lease in ms): fencing tokens for an acquire, once nothing can fail any more; the first, and how many.
-- One that is no plain acquire answers with { 'acquired', first, count }.
local function take(wanted, key, lease)
  if not token then reserve(key, lease) end
  -- One is left for each acquire after this.
  local count = math.min(wanted, last - acquires - token + 1)
  local first = token
  token = token + count
  return first, count
end
