
-- Steps on records, beside those on locks: so that work that was asked for twice is done once. Each of them
-- may be repeated: the same token gets the same answer.
--
-- KEYS, ARGV and the reply to the whole call: see always.lua; KEYS[1 + i] is the record of step i. Answers:
--   claimed ATTEMPT FENCE | completed RESPONSE | running µs-LEFT ATTEMPT | mismatch | orphan ATTEMPT | late |
--   again (this call carries enough results already: ask once more) | done HEARD | not-owner |
--   taken WHAT (other data, or a record that cannot be read) | failed MESSAGE (nothing was changed)
--
-- Data: STRING key, its TTL is the retention:
--   dlock1 STATE LEASE ATTEMPT FENCE TOKEN FINGERPRINT+RESPONSE
-- STATE is c (claimed), o (an orphan at once: given back by its owner, and what was done is unknown) or d (done).
-- LEASE has 16 digits: the end of the claim's lease, server time in µs. The fingerprint has 32 bytes, any
-- bytes, and all that follows is the response. News go to the channel that is called like the key.

-- Adds the steps, where one of them is asked for: calls without any do not pay for them.
local function add_record_steps()
  local results = 0
  local enough = 4 * 1024 * 1024
  -- A response of so many bytes is stored on a server that is full, too: work that was done must not be done again. What is
  -- larger is refused there, and whoever has it stores something small in its place.
  local small = 64 * 1024

  -- What a key holds, nil if nothing. Ends the step where that is no record of this format.
  local function record_at(key)
    local head = ask('GETRANGE', key, 0, 255)
    if is_wrong_type(head) then error({ taken = type_of(key) }) end
    if is_error(head) then error({ failed = head.err }) end
    if head == '' and run('TYPE', key).ok == 'none' then return nil end
    local state, lease, attempt, fence, token, at =
      string.match(head, '^dlock1 ([cod]) (%d+) (%d+) (%d+) (%S+) ()')
    if not state or #lease ~= 16 or #head < at + 31 then
      local version = string.match(head, '^dlock(%d+) ')
      if version and version ~= '1' then
        error({ taken = 'record of format ' .. version .. ', this version of dlock knows format 1' })
      end
      error({ taken = 'string that is no record' })
    end
    return {
      state = state, lease = tonumber(lease), attempt = tonumber(attempt), fence = fence, token = token,
      print = string.sub(head, at, at + 31), response = at + 31,
    }
  end

  local function lease_text(time) return string.format('%016.0f', time) end

  local function head_of(state, lease, attempt, fence, token, print)
    return table.concat({ 'dlock1', state, lease_text(lease), attempt, fence, token, print }, ' ')
  end

  -- Keeps the record for so many ms at least. It is a write in any case, so that the next goes through on a server that is
  -- full, see shorten.
  local function keep(key, retention)
    local left = run('PTTL', key)
    -- A record without an end got that from elsewhere: it is kept for a day rather than forgotten.
    if left < 0 then left = 86400000 end
    run('PEXPIRE', key, math.max(left, retention))
  end

  -- Lets the claim last until then, and the record for so many ms at least.
  local function prolong(key, lease, retention)
    keep(key, retention)
    run('SETRANGE', key, 9, lease_text(lease))
  end

  -- token, fingerprint, lease in µs, retention in ms, refuse after this server time in µs,
  -- 'over' to take an orphan over or 'leave'
  function steps.claim(key, token, print, lease, retention, refuse_after, orphan)
    if now > tonumber(refuse_after) then return { 'late' } end
    local record = record_at(key)
    local lease_until = now + tonumber(lease)
    local attempt = '1'
    if record then
      if record.print ~= print then return { 'mismatch' } end
      if record.state == 'd' then
        local size = run('STRLEN', key) - record.response
        if results > 0 and results + size > enough then return { 'again' } end
        results = results + size
        return { 'completed', run('GETRANGE', key, record.response, -1) }
      end
      if record.state == 'c' and record.token == token then
        prolong(key, math.max(lease_until, record.lease), retention)
        return { 'claimed', record.attempt, record.fence }
      end
      if record.state == 'c' and record.lease > now then
        return { 'running', digits(record.lease - now), record.attempt }
      end
      -- Of a claim that its owner has given back this is a copy that comes late: it would count once more.
      if record.state == 'o' and record.token == token then return { 'late' } end
      if orphan ~= 'over' then return { 'orphan', record.attempt } end
      attempt = digits(record.attempt + 1)
      retention = digits(math.max(run('PTTL', key), tonumber(retention)))
    end
    local _, token_of_fence = move_fence(0)
    token_of_fence = digits(token_of_fence)
    local head = head_of('c', lease_until, attempt, token_of_fence, token, print)
    run('SET', key, head, 'PX', retention)
    return { 'claimed', attempt, token_of_fence }
  end

  -- token, lease in µs, retention in ms
  function steps.extend(key, token, lease, retention)
    local record = record_at(key)
    if not record or record.token ~= token or record.state == 'o' then return { 'not-owner' } end
    if record.state == 'c' then prolong(key, now + tonumber(lease), retention) end
    return { 'done', 0 }
  end

  -- token, retention in ms, response
  function steps.complete(key, token, retention, response)
    local record = record_at(key)
    if not record or record.token ~= token or record.state == 'o' then return { 'not-owner' } end
    if record.state == 'd' then return { 'done', 0 } end
    local head = head_of('d', record.lease, digits(record.attempt), record.fence, token, record.print)
    if #response <= small then keep(key, 0) end
    run('SET', key, head .. response, 'PX', retention)
    return { 'done', tell(key) }
  end

  local function give_back(key, token, forget)
    local record = record_at(key)
    if not record then return { 'done', 0 } end
    if record.token ~= token or record.state == 'd' then return { 'not-owner' } end
    if record.state == 'o' then return { 'done', 0 } end
    if forget and record.attempt == 1 then
      run('DEL', key)
    else
      -- What this owner or the owners before did is unknown, and stays so.
      keep(key, 0)
      run('SETRANGE', key, 7, 'o')
    end
    return { 'done', tell(key) }
  end

  -- token; nothing was done under this claim
  function steps.forget(key, token) return give_back(key, token, true) end

  -- token; what was done under this claim is unknown
  function steps.abandon(key, token) return give_back(key, token, false) end
end
