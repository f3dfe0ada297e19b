-- What steps are made of.

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

-- Notifies other clients; a forbidden channel fails no release. Returns the number of receivers, or -1.
-- In a Cluster, clients listen to sharded channels on the server that has the slot, as Redisson does. Plain channels are
-- for servers before 7, which have no sharded ones, and for channels that may be in another slot: a channel is in the slot
-- of its key if it has the braces of the key alone, or none.
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
-- last one. A value that is no token, or too large for one, counts as lost: the clock is ahead of all tokens that were
-- given, and such a value must stop no client. From 2^53 on Lua cannot count: only an operator who knows the consequences
-- may begin anew.
local function move_fence(besides)
  local before = ask('GET', fence)
  if is_wrong_type(before) then
    error({ failed = 'the key of the fencing tokens, ' .. fence .. ', holds other data, to be removed: ' .. before.err })
  end
  if is_error(before) then error({ failed = before.err }) end
  before = tonumber(before or 0)
  local known = before and before > LEAST and before < 9007199254740992 and before % 1 == 0
  local least = known and before + 1 or now
  local upto = math.max(now, least + besides)
  if upto >= 9007199254740992 then
    error({ failed = 'the key ' .. fence .. ' has come to the last of all fencing tokens: remove this key, and they begin '
      .. "again with the server's clock, below those that were given" })
  end
  run('SET', fence, string.format('%.0f', upto))
  return least, upto
end

-- Reserves the tokens of all acquires with one write. Where there is no last token, it may have been flushed a moment ago,
-- so nothing reaches back and each acquire has one.
local function reserve(key, lease)
  -- The present acquire is no longer counted.
  local least, upto = move_fence(acquires)
  -- A hash whose user may not let it expire must not come to be. There is none yet, so this changes nothing.
  if key then run('PEXPIRE', key, lease) end
  last = upto
  token = math.max(least, upto - math.max(math.min(ARGV[3], REACH), acquires + 1) + 1)
end

-- (wanted, key, lease in ms): fencing tokens for an acquire, once nothing can fail any more; the first, and how many.
-- Acquires of other kinds return { 'acquired', first, count }.
local function take(wanted, key, lease)
  if not token then reserve(key, lease) end
  -- Each later acquire keeps one.
  local count = math.min(wanted, last - acquires - token + 1)
  local first = token
  token = token + count
  return first, count
end

