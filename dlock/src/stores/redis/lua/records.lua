
-- Steps on records, beside those on locks: so that work that was asked for twice is done once. Each of them
-- may be repeated: the same token gets the same answer.
--
-- KEYS, ARGV and the reply to the whole call: see always.lua; KEYS[1 + i] is the record of step i. Answers:
--   claimed ATTEMPT FENCE | completed RESPONSE | running µs-LEFT ATTEMPT | mismatch | orphan ATTEMPT | late |
--   again (this call carries enough results already: ask once more) | done HEARD | not-owner |
--   taken WHAT (other data, or a record that cannot be read) | failed MESSAGE (nothing was changed) |
--   slot NOW SLOT LAST-or-0 ANSWER (times in µs; ANSWER is one of the above, or missed | clock-back | ahead) |
--   record NOW STATE µs-LEFT ATTEMPT FENCE FINGERPRINT TTL-ms SIZE [RESPONSE] | no-record NOW |
--   forgotten | missing | live µs-LEFT ATTEMPT FENCE
--
-- Data: STRING key, its TTL is the retention:
--   dlock1 STATE LEASE ATTEMPT FENCE TOKEN FINGERPRINT+RESPONSE
-- STATE is c (claimed), o (an orphan at once: released by its owner, and what was done is unknown), d (done) or
-- f (free: nothing was done in the slot). Of work with slots of time the fingerprint is the last slot that was claimed:
-- `slot `, 16 digits (µs since the epoch), spaces.
-- LEASE has 16 digits: the end of the claim's lease, server time in µs. The fingerprint has 32 bytes, any
-- bytes, and all that follows is the response. News go to the channel that is called like the key.

-- How many bytes of results the call carries.
local results = 0

-- Adds the steps, where one of them is asked for: calls without any do not pay for them.
local function add_record_steps()
  local enough = 4 * 1024 * 1024
  -- A response of so many bytes is stored on a server that is full, too: work that was done must not be done again. What is
  -- larger is refused there, and the owner stores something small in its place.
  local small = 64 * 1024

  -- What a key holds, nil if nothing. Ends the step where that is no record of this format.
  local function record_at(key)
    local head = ask('GETRANGE', key, 0, 255)
    if is_wrong_type(head) then error({ taken = type_of(key) }) end
    if is_error(head) then error({ failed = head.err }) end
    if head == '' and run('TYPE', key).ok == 'none' then return nil end
    local state, lease, attempt, fence, token, at =
      string.match(head, '^dlock1 ([codf]) (%d+) (%d+) (%d+) (%S+) ()')
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

  -- The slot of a record, nil if it has none.
  local function slot_of(record)
    local digits = string.match(record.print, '^slot (%d+) +$')
    return digits and #digits == 16 and tonumber(digits)
  end

  -- Whether its owner has given it back.
  local function is_given_back(record) return record.state == 'o' or record.state == 'f' end

  -- Keeps the record for so many ms at least. It is a write in any case, so that the next goes through on a server that is
  -- full, see shorten.
  local function keep(key, retention)
    local left = run('PTTL', key)
    -- A record without an end got that from elsewhere: it is kept for a day rather than forgotten.
    if left < 0 then left = 86400000 end
    -- Never at once: what is written next would stay for ever.
    run('PEXPIRE', key, math.max(left, retention, 1))
  end

  -- Lets the claim last until then, and the record for so many ms at least.
  local function prolong(key, lease, retention)
    keep(key, retention)
    run('SETRANGE', key, 9, lease_text(lease))
  end

  -- The answer of a record that is done, within what a call may carry.
  local function completed(key, record)
    local size = run('STRLEN', key) - record.response
    if results > 0 and results + size > enough then return { 'again' } end
    results = results + size
    return { 'completed', run('GETRANGE', key, record.response, -1) }
  end

  local function running(record) return { 'running', digits(record.lease - now), record.attempt } end

  -- Writes a claim, with a fence of its own.
  local function begin(key, token, print, lease, attempt, retention)
    local _, token_of_fence = move_fence(0)
    token_of_fence = digits(token_of_fence)
    run('SET', key, head_of('c', now + tonumber(lease), attempt, token_of_fence, token, print), 'PX', retention)
    return { 'claimed', attempt, token_of_fence }
  end

  -- token, fingerprint, lease in µs, retention in ms, refuse after this server time in µs,
  -- 'over' to take an orphan over or 'leave'
  function steps.claim(key, token, print, lease, retention, refuse_after, orphan)
    if now > tonumber(refuse_after) then return { 'late' } end
    local record = record_at(key)
    local attempt = '1'
    if record then
      if record.print ~= print then return { 'mismatch' } end
      if record.state == 'd' then return completed(key, record) end
      if record.state == 'c' and record.token == token then
        prolong(key, math.max(now + tonumber(lease), record.lease), retention)
        return { 'claimed', record.attempt, record.fence }
      end
      if record.state == 'c' and record.lease > now then return running(record) end
      -- A late copy of a claim that its owner has released: it would count once more.
      if record.state == 'o' and record.token == token then return { 'late' } end
      if orphan ~= 'over' then return { 'orphan', record.attempt } end
      attempt = digits(record.attempt + 1)
      retention = digits(math.max(run('PTTL', key), tonumber(retention)))
    end
    return begin(key, token, print, lease, attempt, retention)
  end

  -- token, lease in µs, retention in ms, refuse after this server time in µs, 'over' or 'leave' for an orphan of the same
  -- slot, period in µs or 0, slot in µs or 0 for the nearest, how many µs ahead of the nearest a slot may be
  function steps.claim_slot(key, token, lease, retention, refuse_after, orphan, period, slot, ahead)
    if now > tonumber(refuse_after) then return { 'late' } end
    local record = record_at(key)
    local last = record and slot_of(record)
    period, slot = tonumber(period), tonumber(slot)
    local latest = now
    if period > 0 then
      local middle = now + math.floor(period / 2)
      latest = middle - math.fmod(middle, period)
    end
    if slot == 0 then slot = latest end
    latest = latest + tonumber(ahead)

    local function answer(of_slot, inner)
      return { 'slot', digits(now), digits(of_slot), digits(last or 0), inner }
    end
    if record and not last then return answer(slot, { 'mismatch' }) end
    if record and record.token == token then
      if record.state ~= 'c' then return answer(last, { 'missed' }) end
      prolong(key, math.max(now + tonumber(lease), record.lease), retention)
      return answer(last, { 'claimed', record.attempt, record.fence })
    end
    if slot > latest then return answer(slot, { 'ahead' }) end
    if record and last > latest then return answer(slot, { 'clock-back' }) end
    if (record and last > slot) or now - slot > tonumber(retention) * 1000 then return answer(slot, { 'missed' }) end
    local attempt = '1'
    -- From the beginning of the slot on, which may be still to come.
    retention = digits(retention + math.max(math.ceil((slot - now) / 1000), 0))
    if record then
      if last == slot and record.state == 'd' then
        local done = completed(key, record)
        return done[1] == 'again' and done or answer(slot, done)
      end
      if record.state == 'c' and record.lease > now then return answer(slot, running(record)) end
      if last == slot and record.state ~= 'f' then
        if orphan ~= 'over' then return answer(slot, { 'orphan', record.attempt }) end
        attempt = digits(record.attempt + 1)
      end
      retention = digits(math.max(run('PTTL', key), tonumber(retention)))
    end
    local print = string.format('slot %016.0f           ', slot)
    return answer(slot, begin(key, token, print, lease, attempt, retention))
  end

  -- token, lease in µs, retention in ms
  function steps.extend(key, token, lease, retention)
    local record = record_at(key)
    if not record or record.token ~= token or is_given_back(record) then return { 'not-owner' } end
    if record.state == 'c' then prolong(key, now + tonumber(lease), retention) end
    return { 'done', 0 }
  end

  -- token, retention in ms, response
  function steps.complete(key, token, retention, response)
    local record = record_at(key)
    if not record or record.token ~= token or is_given_back(record) then return { 'not-owner' } end
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
    if is_given_back(record) then return { 'done', 0 } end
    local is_free = forget and record.attempt == 1
    if is_free and not slot_of(record) then
      run('DEL', key)
    else
      -- What this owner or the owners before did is unknown, and stays so; or the last slot is known yet.
      keep(key, 0)
      if forget and not is_free then
        -- The attempt was none.
        local attempt = digits(record.attempt - 1)
        run('SET', key, head_of('o', record.lease, attempt, record.fence, token, record.print), 'KEEPTTL')
      else
        run('SETRANGE', key, 7, is_free and 'f' or 'o')
      end
    end
    return { 'done', tell(key) }
  end

  -- token; nothing was done under this claim
  function steps.forget(key, token) return give_back(key, token, true) end

  -- token; what was done under this claim is unknown
  function steps.abandon(key, token) return give_back(key, token, false) end

  -- 1 for the response, too
  function steps.look_at_record(key, response)
    local record = record_at(key)
    if not record then return { 'no-record', digits(now) } end
    local size = run('STRLEN', key) - record.response
    local answer = {
      'record', digits(now), record.state, digits(math.max(record.lease - now, 0)), digits(record.attempt), record.fence,
      record.print, digits(math.max(run('PTTL', key), 0)), digits(size),
    }
    if response == '1' and record.state == 'd' then
      if results > 0 and results + size > enough then return { 'again' } end
      results = results + size
      answer[10] = run('GETRANGE', key, record.response, -1)
    end
    return answer
  end

  -- refuse after this server time in µs
  function steps.forget_record(key, refuse_after)
    if now > tonumber(refuse_after) then return { 'late' } end
    local record = record_at(key)
    if not record then return { 'missing' } end
    if record.state == 'c' and record.lease > now then
      return { 'live', digits(record.lease - now), digits(record.attempt), record.fence }
    end
    run('DEL', key)
    tell(key)
    return { 'forgotten' }
  end
end
