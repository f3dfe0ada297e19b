-- Takes the steps in their order, see always.lua.

local replies = { now }
local late = now > tonumber(ARGV[1])

-- What rare.lua gives, once it was needed.
local parts

local at, step, filled = 5, 1, 1
local what = ARGV[5]
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
      parts = parts or rare()
      reply = parts.attempt(parts.busy, key, left)
    else
      local lease = ARGV[at + 2]
      if not token then
        -- As parts.reserve does it where the clock is ahead of the last token by all that are yet to be given.
        local before = ask('SET', fence, now, 'GET')
        local known = tonumber(before or nil)
        if known and known > 0 and known + acquires < now and known % 1 == 0 then
          token, last = math.max(known + 1, now - math.min(ARGV[3], REACH) + 1), now
        else
          -- Put back, or else there was none, and the next token is after this moment.
          if type(before) == 'string' then ask('SET', fence, before) end
          parts = parts or rare()
          reply = parts.attempt(parts.reserve, key, lease)
        end
      end
      if not reply then
        local set = ask('HSET', key, ARGV[at + 1], '1')
        if set ~= 1 then
          reply = { 'failed', tostring(set.err) }
        else
          set = ask('PEXPIRE', key, lease)
          if set ~= 1 then
            parts = parts or rare()
            reply = parts.undo(key, ARGV[at + 1], set)
          else
            -- One is left for each acquire after this.
            reply = math.min(ARGV[at + 3], last - acquires - token + 1)
            filled = filled + 1
            replies[filled] = token
            token = token + reply
          end
        end
      end
    end
    at = at + 4
    abstains = false
  elseif what == 'release' then
    if ARGV[at + 2] ~= '0' then
      parts = parts or rare()
      reply = parts.attempt(parts.others().keep, key, ARGV[at + 1], ARGV[at + 2], ARGV[at + 3])
    else
      local gone = ask('HDEL', key, ARGV[at + 1])
      if gone == 1 then
        if in_cluster then
          parts = parts or rare()
          reply = parts.released(parts.tell(ARGV[at + 3]))
        else
          -- As parts.tell does it where there are no slots.
          local heard = ask('PUBLISH', ARGV[at + 3], '0')
          reply = type(heard) == 'number' and 1 + heard or -1
        end
      elseif gone == 0 then
        reply = 0
      else
        parts = parts or rare()
        -- Other data in its place is a loss like any other.
        reply = parts.is_wrong_type(gone) and 0 or { 'failed', tostring(gone.err) }
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
        parts = parts or rare()
        local err = parts.is_error(set) or parts.is_error(holds)
        others = others or { 'others' }
        others[#others + 1] = i
        -- Other data in its place is a loss like any other.
        others[#others + 1] = err and not parts.is_wrong_type(holds) and tostring(err) or 0
      end
    end
    reply = others or 1
    step = step + count - 1
    at = at + 1 + count
  elseif what == 'all' then
    parts = parts or rare()
    local count, first = tonumber(ARGV[at + 1]), at + 2
    at = first
    for _ = 1, count do at = at + 2 + ARGV[at + 1] end
    local after = acquires - count
    reply = (late or abstains) and { 'late' } or parts.attempt(parts.others().all, step, count, first)
    acquires, abstains = after, false
    step = step + count - 1
  else
    parts = parts or rare()
    local steps, acquire_as = parts.others()
    local count = tonumber(ARGV[at + 1])
    local step_of_kind = acquire_as[what]
    if step_of_kind then acquires = acquires - 1 end
    if step_of_kind and (late or abstains) then
      reply = { 'late' }
    else
      reply = parts.attempt(step_of_kind or steps[what], key, unpack(ARGV, at + 2, at + 1 + count))
    end
    if step_of_kind then abstains = false end
    at = at + 2 + count
  end
  filled = filled + 1
  replies[filled] = reply
  what = ARGV[at]
end
return replies
