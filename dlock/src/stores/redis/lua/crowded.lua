-- Steps of plain locks that many processes wait for.

-- Up to so many processes that wait for a plain lock may all ask when it becomes available.
local FEW = 4

-- What became of an acquire that is not as simple as it should be.
local function busy(key, left)
  if is_error(left) then error({ failed = left.err }) end
  -- It may have ended since its time was asked for.
  if not holder_of(key) then return -2 end
  local listeners = ask('PUBSUB', in_cluster and 'SHARDNUMSUB' or 'NUMSUB', prefixed('redisson_lock__channel', key))
  if not is_error(listeners) and listeners[2] > FEW then return { 'busy', left, -1, listeners[2] } end
  return -2 - left
end

-- Acquires a plain lock for one of many processes that were notified of its release, and tells the others that it is taken:
-- they ask only if they hear nothing. Redisson looks at the messages 0 and 1 alone.
local function add_crowded_steps()
  -- grant, lease in ms, how many tokens, whether to tell also where another one has it
  function acquire_as.crowded(key, grant, lease, tokens, always)
    local left = run('PTTL', key)
    local reply
    -- It may have ended since its time was asked for. A lease in its last millisecond has no time left, and is held.
    if left == -2 or not holder_of(key) then
      local first, count = take(tonumber(tokens), key, lease)
      hold(key, grant, lease)
      reply = { 'acquired', first, count }
      always = '1'
    else
      reply = busy(key, left)
    end
    if always == '1' then tell(prefixed('redisson_lock__channel', key), '2') end
    return reply
  end
end
