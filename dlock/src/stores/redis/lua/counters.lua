-- Steps on the number of permits of a semaphore and on count-down latches.
--
-- KEYS, ARGV and the reply to the whole call: see always.lua; KEYS[1 + i] is the semaphore or latch of step i.
-- Answers:
--   permits FREE HELD | unset HELD (the total is not set) | changed 1-or-0 | number N | too-few N |
--   too-many | late | taken WHAT (other data) | failed MESSAGE (nothing was changed)
--
-- Data: those of permits.lua, and as Redisson 4.7 has them for RCountDownLatch:
--   STRING name   the count; there is none at zero, when redisson_countdownlatch__channel__{name}, always with
--                 braces of its own, gets 0; it gets 1 when a count was set
-- In addition, dlock has:
--   STRING {name}:dlock:REQUEST   the answer to a step that was carried out, for as long as it may come again

-- Adds the steps, with what permits.lua has for semaphores.
local function add_counter_steps(semaphores)
  -- What Redisson can count.
  local most = 2147483647
  -- (key, arguments): the answer, and what remains to be done for it, if anything.
  local counts = {}
  -- What goes through on a server that is full.
  local gives_back = { give = true, count_down = true, delete = true, delete_latch = true }

  -- what, request or '' for a look, ms for which it may come again, refuse after this server time in µs,
  -- arguments
  function steps.count(key, what, request, remember, refuse_after, ...)
    if request == '' then return (counts[what](key, ...)) end
    if now > tonumber(refuse_after) then return { 'late' } end
    local mine = suffixed(key, 'dlock:' .. request)
    local before = run('GET', mine)
    if before then
      local words = {}
      for word in string.gmatch(before, '%S+') do words[#words + 1] = word end
      return words
    end
    -- A write that changes nothing, see shorten.
    if gives_back[what] then run('DEL', mine) end
    local reply, carry_out = counts[what](key, ...)
    -- First, since what comes again must not be carried out again.
    run('SET', mine, table.concat(reply, ' '), 'PX', remember)
    if carry_out then
      local ok, failure = pcall(carry_out)
      if not ok then
        ask('DEL', mine)
        error(failure)
      end
    end
    return reply
  end

  function counts.permits(key)
    local semaphore = semaphores.found(key)
    local held = semaphores.held(semaphore)
    if not semaphore.free then return { 'unset', held } end
    return { 'permits', digits(semaphore.free), held }
  end

  -- More permits, or fewer, than there are now; where there are none yet, so many.
  local function alter(semaphore, by, all_if_none)
    return function()
      if semaphore.free then
        semaphores.change(semaphore, by)
      else
        semaphores.set_free(semaphore, all_if_none)
      end
      if by > 0 then semaphores.tell_total(semaphore) end
    end
  end

  -- the total, '1' to set it only where none is set
  function counts.set(key, total, only_unset)
    local semaphore = semaphores.found(key)
    local held = semaphores.held(semaphore)
    if not semaphore.free then return { 'changed', 1 }, alter(semaphore, 1, total - held) end
    local by = total - held - semaphore.free
    if only_unset == '1' or by == 0 then return { 'changed', 0 } end
    return { 'changed', 1 }, alter(semaphore, by)
  end

  -- the difference, '1' where the permits have no known holders
  function counts.add(key, by, unowned)
    local semaphore = semaphores.found(key)
    local held = semaphores.held(semaphore)
    local free = (semaphore.free or -held) + by
    if by + 0 < 0 and (not semaphore.free or (unowned ~= '1' and free + held < 0)) then
      return { 'too-few', digits(math.max(0, free - by + held)) }
    end
    if free + held > most or free < -most then return { 'too-many' } end
    return { 'permits', digits(free), held }, alter(semaphore, by + 0, free)
  end

  -- how many
  function counts.give(key, amount)
    local semaphore = semaphores.found(key)
    if not semaphore.free then return { 'too-few', 0 } end
    local held, free = semaphores.held(semaphore), semaphore.free + amount
    if free + held > most then return { 'too-many' } end
    return { 'permits', digits(free), held }, alter(semaphore, amount + 0)
  end

  function counts.drain(key)
    local semaphore = semaphores.found(key)
    local free = math.max(0, semaphore.free or 0)
    if free == 0 then return { 'number', 0 } end
    return { 'number', digits(free) }, alter(semaphore, -free)
  end

  function counts.delete(key)
    local semaphore = semaphores.found(key)
    if not semaphore.free and (semaphores.held(semaphore) == 0 or semaphores.are_of_another(key)) then
      return { 'changed', 0 }
    end
    return { 'changed', 1 }, function()
      run('DEL', semaphore.free_key)
      semaphores.remember_deletion(key)
      ask('DEL', semaphore.held_key)
      ask('DEL', semaphore.queue_key)
      -- A waiter may set the total.
      tell(semaphore.channel, '1')
    end
  end

  local function tell_latch(key, message)
    tell('redisson_countdownlatch__channel__{' .. key .. '}', message)
  end

  function counts.count(key) return { 'number', digits(math.max(0, number_at(key) or 0)) } end

  -- the count
  function counts.set_count(key, count)
    if number_at(key) then return { 'changed', 0 } end
    return { 'changed', 1 }, function()
      run('SET', key, count)
      tell_latch(key, '1')
    end
  end

  function counts.count_down(key)
    local count = number_at(key)
    if not count or count <= 0 then return { 'too-few', 0 } end
    return { 'number', digits(count - 1) }, function()
      if count > 1 then
        run('INCRBY', key, -1)
      else
        run('DEL', key)
        tell_latch(key, '0')
      end
    end
  end

  function counts.delete_latch(key)
    if not number_at(key) then return { 'changed', 0 } end
    return { 'changed', 1 }, function()
      run('DEL', key)
      -- No latch is an open latch.
      tell_latch(key, '0')
    end
  end
end
