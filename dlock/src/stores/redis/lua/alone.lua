-- The short calls of a lone acquire: of a plain lock, or of a fair one, which continues in queue.lua if the lock is not free.

local short = ARGV[1]
-- How long the lock is still held, -2 if it is free.
local left
if short == 'acquire' or short == 'queue' then
  local failure = look_at_the_clock()
  if failure then return failure end
  local key, late, grant, lease, tokens = KEYS[2], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  local wanted = tokens + 0
  left = ask('PTTL', key)
  local may_acquire = left == -2 and now <= late + 0
  -- Of a fair lock: the first waiters in its queue, one more than there are tokens.
  local waiters
  if may_acquire and short == 'queue' then
    grant = grant .. ARGV[10]
    waiters = ask('LRANGE', KEYS[3], '0', tokens)
    may_acquire = ARGV[9] == 'fair' and not ARGV[11] and not waiters.err and (not waiters[1] or waiters[1] == grant)
      -- One of Redisson's right behind gets what is left of its time, in fair.lua.
      and (not waiters[2] or string.find(waiters[2], '^%x+%-%x+%-8%x%x%x%-'))
    if may_acquire and waiters[2] then
      -- Else fair.lua tidies the end of the queue.
      local id = waiters[wanted + 1] and ask('LINDEX', KEYS[3], '-1') or waiters[#waiters]
      local upto = ask('ZSCORE', KEYS[4], id)
      may_acquire = type(upto) == 'string' and upto % 1 == 0 and string.find(id, '^%x+%-%x+%-8%x%x%x%-')
    end
  end
  -- As in run.lua: the lock is free, and the clock is ahead of the last token.
  if may_acquire then
    local before = ask('SET', fence, now_text, 'GET')
    local known = tonumber(before or nil)
    if known and known > LEAST and known < now and known % 1 == 0 then
      local count = wanted
      if count > REACH then count = REACH end
      if count > now - known then count = now - known end
      if waiters and waiters[1] then
        local trimmed, removed = ask('LTRIM', KEYS[3], '1', '-1'), ask('ZREM', KEYS[4], grant)
        if trimmed.err then return { now, { 'failed', trimmed.err .. ' (' .. KEYS[3] .. ')' } } end
        if type(removed) == 'table' then return { now, { 'failed', removed.err .. ' (' .. KEYS[4] .. ')' } } end
      end
      if ask('HSET', key, grant, '1') == 1 then
        local set = ask('PEXPIRE', key, lease)
        if set == 1 then
          if waiters then
            local answer, client = { 'acquired', now - count + 1, count }, ARGV[3]
            for i = 2, wanted do
              local id = waiters[i]
              if not id or string.sub(id, 1, #client) ~= client then break end
              answer[i + 2] = tonumber(string.sub(id, #client + 1))
            end
            return { now, answer }
          end
          return count == wanted and now or { now, now - count + 1, count }
        end
        -- As undo in steps.lua.
        if type(ask('HDEL', key, grant)) == 'table' and type(ask('DEL', key)) == 'table' then
          ask('SET', key, '', 'PX', 1)
        end
        return { now, { 'failed', tostring(set.err) } }
      end
    elseif type(before) == 'string' then
      ask('SET', fence, before)
    end
  end
  if short == 'acquire' then ARGV = { late, '1', tokens, ARGV[6] or '0', 'acquire', grant, lease, tokens } end
end
