-- Steps on a member of a quorum.
--
-- KEYS, ARGV and the reply to the whole call: see always.lua. Answers:
--   vote         1 it votes | abstains ms-UNTIL-IT-VOTES; it is about the acquire that comes next, which answers
--                `late` where it abstains
--   raise_fence  1 done | 0 the grant is not there
--
-- Data: HASH dlock:voter { run -> the server process that was asked last, since -> when it was first asked, in µs }.
-- It stands beside the locks, so that it is gone when they are; a process that was started anew may have lost
-- the last of them. Either way the time begins again.

local function add_quorum_steps()
  -- run id, ms that this server has to be up with its data
  function steps.vote(key, run_id, after)
    -- Also where something fails.
    abstains = true
    if run_id == '' then error({ failed = 'it does not tell its run_id (may this user call INFO?)' }) end
    local since
    if run('HGET', key, 'run') == run_id then since = tonumber(run('HGET', key, 'since') or nil) end
    -- A mark of the future is that of a clock which was ahead.
    if not since or since > now then
      since = now
      run('HSET', key, 'run', run_id, 'since', digits(now))
    end
    local left = since + after * 1000 - now
    abstains = left > 0
    if not abstains then return 1 end
    return { 'abstains', math.ceil(left / 1000) }
  end

  -- field of the holder, token
  function steps.raise_fence(key, field, at_least)
    if run('HEXISTS', key, field) == 0 then return 0 end
    local _, upto = move_fence(0)
    if upto < tonumber(at_least) then run('SET', fence, at_least) end
    -- Whatever is reserved may be less.
    token = nil
    return 1
  end
end
