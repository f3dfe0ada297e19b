-- Steps on the entries in which clients describe themselves, and on their mailboxes.
--
-- KEYS, ARGV and the reply to the whole call: see always.lua; KEYS[1 + i] is the entry of step i.
-- Answers: entry VALUE PTTL | mail MESSAGE... | number N (of receivers) | done 0 | free | beyond (it is full) |
--   taken WHAT (other data) | failed MESSAGE
--
-- Data:
--   STRING name   an entry; its TTL is how long it is kept
--   HASH name     a mailbox: { id -> message }
--   STREAM name   the audit log

-- Adds the steps.
local function add_entry_steps()
  -- Ends the step where there is something else.
  local function read(...)
    local reply = ask(...)
    if is_wrong_type(reply) then error({ taken = type_of((select(2, ...))) }) end
    if is_error(reply) then error({ failed = reply.err }) end
    return reply
  end

  -- value, ttl in ms, the channel that is told or ''
  function steps.put(key, value, ttl, channel)
    run('SET', key, value, 'PX', ttl)
    return { 'number', channel ~= '' and math.max(0, tell(channel)) or 0 }
  end

  function steps.entry(key)
    local value = read('GET', key)
    if not value then return { 'free' } end
    return { 'entry', value, run('PTTL', key) }
  end

  function steps.drop(key)
    run('DEL', key)
    return { 'done', 0 }
  end

  -- how many messages there may be, id, message, ttl in ms, channel
  function steps.post(key, most, id, message, ttl, channel)
    if read('HLEN', key) >= most + 0 and run('HEXISTS', key, id) == 0 then return { 'beyond' } end
    run('HSET', key, id, message)
    run('PEXPIRE', key, ttl)
    return { 'number', math.max(0, tell(channel)) }
  end

  function steps.mail(key)
    local all = read('HGETALL', key)
    local reply = { 'mail' }
    if #all > 0 then run('DEL', key) end
    for i = 2, #all, 2 do reply[#reply + 1] = all[i] end
    return reply
  end

  -- how many entries are kept, fields and values
  function steps.audit(key, most, ...)
    read('XADD', key, 'MAXLEN', '~', most, '*', ...)
    return { 'done', 0 }
  end
end
