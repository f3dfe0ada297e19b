-- Steps on fenced locks: plain locks with a count of their own of all acquisitions.
--
-- KEYS, ARGV and the reply to the whole call: see always.lua. The step:
--   fenced GRANT LEASE-ms TOKENS   an acquire, with one token however many are wanted
-- All else is as with plain locks.
--
-- Data, as Redisson 4.7 has them: the hash of the plain lock, and
--   STRING redisson_lock_token:{name}   the last fencing token
-- Where there is none, it begins with the server's clock in µs, and is not behind it afterwards, so that it does not go back
-- where it was lost. One that Java began goes on by one at each acquisition.

local function add_fenced_steps()
  local function next_token(counter)
    local last = ask('GET', counter)
    if last == false then
      run('SET', counter, digits(now))
      return now
    end
    if is_error(last) and not is_wrong_type(last) then error({ failed = last.err }) end
    -- From 2^53 on Lua does not count any more.
    if is_error(last) or not string.find(last, '^%d+$') or tonumber(last) >= 9007199254740991 then
      error({ failed = counter .. " holds no fencing token, or the last of all: remove this key, and they begin with the "
        .. "server's clock" })
    end
    if tonumber(last) > LEAST then
      -- It began with the clock. A fail-over, or a restart, may have lost the last of its tokens.
      local token = math.max(tonumber(last) + 1, now)
      run('SET', counter, digits(token))
      return token
    end
    local token = run('INCR', counter)
    -- Redisson's multi-locks let it expire together with the lock.
    run('PERSIST', counter)
    return token
  end

  function acquire_as.fenced(key, grant, lease)
    local left = run('PTTL', key)
    -- It may have ended since its time was asked for.
    if left ~= -2 and holder_of(key) then return { 'busy', left } end
    local token = next_token(prefixed('redisson_lock_token', key))
    hold(key, grant, lease)
    return { 'acquired', token, 1 }
  end
end
