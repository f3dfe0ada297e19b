-- Takes the steps in their order, see always.lua. Its loop ends in rest.lua.

local in_cluster = ARGV[4] == '1'
-- Acquires from the present one on, the present one not counted any more.
local acquires = tonumber(ARGV[2])
if acquires > 0 and not now then
  -- Nothing has been done yet.
  local failure = look_at_the_clock()
  if failure then return failure end
end
-- The next fencing token, and the last of those that were reserved for the acquires of this call.
local token, last
-- Whether this server, as a member of a quorum, has no say in the acquire that comes next.
local abstains = false

local late = now and now > tonumber(ARGV[1])
local replies = { 0 }

-- What rare.lua gives, once it was needed.
local parts

local at, step, filled = 5, 1, 1
local what = ARGV[5]
while what do
  step = step + 1
  local key = KEYS[step]
  -- The answer, and how many arguments the step has besides its name. No answer: rest.lua has it, with what went wrong here
  -- and the reply that said so.
  local reply, words = nil, 2
  local trouble, why
  if what == 'acquire' then
    words = 3
    acquires = acquires - 1
    why = not (late or abstains) and ask('PTTL', key)
    if why ~= -2 then
      trouble = 'busy'
    elseif not token then
      -- As parts.reserve does it where the clock is ahead of the last token by all that are yet to be given.
      local before = ask('SET', fence, now_text, 'GET')
      local known = tonumber(before or nil)
      if known and known > LEAST and known + acquires < now and known % 1 == 0 then
        token, last = math.max(known + 1, now - math.min(ARGV[3], REACH) + 1), now
      else
        -- Put back, or else there was none, and the next token is after this moment.
        if type(before) == 'string' then ask('SET', fence, before) end
        trouble = 'no token'
      end
    end
    if not trouble then
      local set = ask('HSET', key, ARGV[at + 1], '1')
      if set ~= 1 then
        reply = { 'failed', tostring(set.err) }
      else
        set = ask('PEXPIRE', key, ARGV[at + 2])
        if set ~= 1 then
          trouble, why = 'no lease', set
        else
          -- Each later acquire keeps one.
          reply = math.min(ARGV[at + 3], last - acquires - token + 1)
          filled = filled + 1
          replies[filled] = token
          token = token + reply
        end
      end
    end
  elseif what == 'release' then
    why = ask('HDEL', key, ARGV[at + 1])
    if why == 1 and not in_cluster then
      -- As parts.tell does it where there are no slots.
      local heard = ask('PUBLISH', ARGV[at + 2], '0')
      reply = type(heard) == 'number' and 1 + heard or -1
    end
  elseif what == 'renew' then
    local lease, count = ARGV[at + 1], tonumber(ARGV[at + 2])
    words = 2 + count
    for i = 1, count do
      key = KEYS[step + i - 1]
      local holds = ask('HGET', key, ARGV[at + 2 + i])
      local set = holds == '1' and ask('PEXPIRE', key, lease)
      if set ~= 1 then
        trouble = trouble or {}
        trouble[i] = { holds, set }
      end
    end
    reply = not trouble and 1 or nil
    step = step + count - 1
  end
  if reply == nil then
    -- What follows here: rare.lua as a function, and rest.lua.
