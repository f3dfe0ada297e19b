-- Several locks in one step: all of them or none.
--
--   all COUNT, then for each of as many keys its kind, the number of its arguments, its arguments; the first
--   of these is the grant
--
-- Answer: { 'all', FIRST TOKEN, COUNT, ... } with a pair for each key, or { 'none', PLACE, answer } with the
-- answer to the first that was not had, places counted from 0. Nothing stays of those before it.

local function add_several_steps()
  -- grant, lease in ms, fencing tokens wanted: the plain lock among others
  function acquire_as.lock(key, grant, lease, wanted)
    local left = run('PTTL', key)
    if left ~= -2 then
      -- It may have ended since its time was asked for.
      return { 'busy', holder_of(key) and left or 0 }
    end
    local first, count = take(wanted, key, lease)
    hold(key, grant, lease)
    return { 'acquired', first, count }
  end

  -- The place of the first key among all, how many there are, and where their arguments begin.
  function steps.all(place, count, at)
    local reply, taken = { 'all' }, {}
    for i = 1, count do
      local key, kind, words = KEYS[place + i - 1], ARGV[at], tonumber(ARGV[at + 1])
      acquires = acquires - 1
      local answer = attempt(acquire_as[kind], key, unpack(ARGV, at + 2, at + 1 + words))
      if answer[1] ~= 'acquired' then
        for back = #taken, 1, -1 do taken[back]() end
        return { 'none', i - 1, answer }
      end
      reply[2 * i], reply[2 * i + 1] = answer[2], answer[3]
      local grant = ARGV[at + 2]
      taken[i] = function()
        local release = steps['release_' .. kind]
        if release then
          attempt(release, key, grant, '0')
        else
          undo(key, grant)
        end
      end
      at = at + 2 + words
    end
    return reply
  end
end
