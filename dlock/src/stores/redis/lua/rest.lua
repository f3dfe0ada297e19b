    -- The end of the loop of run.lua: what the three steps there do seldom, and all others.
    if not parts then
      -- Steps before may have been done.
      if not now and look_at_the_clock() then redis.call('TIME') end
      parts = rare()
    end
    if what == 'acquire' then
      if late or abstains then
        reply = { 'late' }
      elseif trouble == 'busy' then
        reply = parts.attempt(parts.busy, key, why)
      elseif trouble == 'no lease' then
        reply = parts.undo(key, ARGV[at + 1], why)
      else
        reply = parts.attempt(parts.reserve, key, ARGV[at + 2])
      end
      abstains = abstains and reply == nil
    elseif what == 'release' then
      if why == 1 then
        reply = parts.released(parts.tell(ARGV[at + 2]))
      else
        -- Other data in its place is a loss like any other.
        reply = (why == 0 or parts.is_wrong_type(why)) and 0 or { 'failed', tostring(why.err) }
      end
    elseif what == 'renew' then
      reply = { 'others' }
      for i = 1, words - 2 do
        local one = trouble[i]
        if one then
          local holds, set = one[1], one[2]
          local err = parts.is_error(set) or parts.is_error(holds)
          reply[#reply + 1] = i
          -- Other data in its place is a loss like any other.
          reply[#reply + 1] = err and not parts.is_wrong_type(holds) and tostring(err) or 0
        end
      end
    elseif what == 'all' then
      local count, first = tonumber(ARGV[at + 1]), at + 2
      words = 1
      for _ = 1, count do words = words + 2 + ARGV[at + words + 2] end
      local after = acquires - count
      reply = (late or abstains) and { 'late' } or parts.attempt(parts.others('all').all, step, count, first)
      acquires, abstains = after, false
      step = step + count - 1
    else
      local steps, acquire_as = parts.others(what)
      local count = tonumber(ARGV[at + 1])
      local step_of_kind = acquire_as[what]
      if step_of_kind then acquires = acquires - 1 end
      if step_of_kind and (late or abstains) then
        reply = { 'late' }
      else
        reply = parts.attempt(step_of_kind or steps[what], key, unpack(ARGV, at + 2, at + 1 + count))
      end
      if step_of_kind then abstains = false end
      -- It may have taken others behind it, too.
      words = 1 + ARGV[at + 1]
    end
  end
  -- With tokens for all the acquire is tried once more.
  if reply == nil and trouble == 'no token' then
    step, acquires = step - 1, acquires + 1
  else
    filled = filled + 1
    replies[filled] = reply
    at = at + 1 + words
    what = ARGV[at]
  end
end
replies[1] = now or 0
return replies
