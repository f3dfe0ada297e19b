
-- Takes the steps in their order, see steps.lua.

local replies = { now }
local late = now > tonumber(ARGV[1])

-- Reserves the tokens of all acquires with one write. They reach back, so that they never outrun the clock:
-- after a flush the clock alone must be ahead of every token ever given. Where there is no last token, it may
-- have been flushed a moment ago, so nothing reaches back and each acquire has one. They reach back by REACH
-- at the most, in µs: a replica that takes over knows an older last token, and takes longer than that.
local REACH = 5000
local function reserve(key, lease)
  local before = last_token()
  local least = before > 0 and before + 1 or now
  -- The present one is not counted any more.
  local upto = math.max(now, least + acquires)
  run('SET', fence, digits(upto))
  -- A hash whose user may not let it expire must not come to be. There is none yet, so this changes nothing.
  if key then run('PEXPIRE', key, lease) end
  last = upto
  token = math.max(least, upto - math.min(ARGV[3], REACH) + 1)
end

-- Tokens for an acquire that has come to its end: the first, and how many.
function take(wanted, key, lease)
  if not token then reserve(key, lease) end
  -- One is left for each acquire after this.
  local count = math.min(wanted, last - acquires - token + 1)
  local first = token
  token = token + count
  return first, count
end

local function add_steps()
  steps = {}
  add_lock_steps()
  add_record_steps()
  add_quorum_steps()
  add_read_write_steps()
  add_several_steps()
  add_fair_steps()
  add_fenced_steps()
  add_counter_steps(add_permit_steps())
end

-- What became of an acquire that is not as simple as it should be.
local function busy(key, left)
  if is_error(left) then error({ failed = left.err }) end
  -- It may have ended since its time was asked for.
  if not holder_of(key) then return -2 end
  return -2 - left
end

local at, step, filled = 4, 1, 1
local what = ARGV[4]
while what do
  step = step + 1
  local key = KEYS[step]
  local reply
  if what == 'acquire' then
    acquires = acquires - 1
    local left = not (late or abstains) and ask('PTTL', key)
    if late or abstains then
      reply = { 'late' }
    elseif left ~= -2 then
      reply = attempt(busy, key, left)
    else
      local lease = ARGV[at + 2]
      if not token then reply = attempt(reserve, key, lease) end
      if not reply then
        local set = ask('HSET', key, ARGV[at + 1], '1')
        if set ~= 1 then
          reply = { 'failed', tostring(set.err) }
        else
          set = ask('PEXPIRE', key, lease)
          if set ~= 1 then
            reply = undo(key, ARGV[at + 1], set)
          else
            filled = filled + 1
            replies[filled], reply = take(ARGV[at + 3])
          end
        end
      end
    end
    at = at + 4
    abstains = false
  elseif what == 'release' then
    if ARGV[at + 2] ~= '0' then
      if not steps then add_steps() end
      reply = attempt(steps.keep, key, ARGV[at + 1], ARGV[at + 2], ARGV[at + 3])
    else
      local gone = ask('HDEL', key, ARGV[at + 1])
      if gone == 1 then
        reply = released(tell(ARGV[at + 3]))
      elseif gone == 0 or is_wrong_type(gone) then
        -- Other data in its place is a loss like any other.
        reply = 0
      else
        reply = { 'failed', tostring(gone.err) }
      end
    end
    at = at + 4
  elseif what == 'renew' then
    local lease, count, others = ARGV[at + 1], tonumber(ARGV[at + 2]), nil
    at = at + 2
    for i = 1, count do
      key = KEYS[step + i - 1]
      local holds = ask('HGET', key, ARGV[at + i])
      local set = holds == '1' and ask('PEXPIRE', key, lease)
      if set ~= 1 then
        local err = is_error(set) or is_error(holds)
        others = others or { 'others' }
        others[#others + 1] = i
        -- Other data in its place is a loss like any other.
        others[#others + 1] = err and not is_wrong_type(holds) and tostring(err) or 0
      end
    end
    reply = others or 1
    step = step + count - 1
    at = at + 1 + count
  elseif what == 'all' then
    if not steps then add_steps() end
    local count, first = tonumber(ARGV[at + 1]), at + 2
    at = first
    for _ = 1, count do at = at + 2 + ARGV[at + 1] end
    local after = acquires - count
    reply = (late or abstains) and { 'late' } or attempt(steps.all, step, count, first)
    acquires, abstains = after, false
    step = step + count - 1
  else
    if not steps then add_steps() end
    local count = tonumber(ARGV[at + 1])
    local step_of_kind = acquire_as[what]
    if step_of_kind then acquires = acquires - 1 end
    if step_of_kind and (late or abstains) then
      reply = { 'late' }
    else
      reply = attempt(step_of_kind or steps[what], key, unpack(ARGV, at + 2, at + 1 + count))
    end
    if step_of_kind then abstains = false end
    at = at + 2 + count
  end
  filled = filled + 1
  replies[filled] = reply
  what = ARGV[at]
end
return replies
