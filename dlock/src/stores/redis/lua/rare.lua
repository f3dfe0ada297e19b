
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

-- The steps that need nothing but their own family: making all steps takes longer than any of these. A family may bring others,
-- which are not whole without the rest.
local family_of = {
  keep = add_lock_steps, crowded = add_crowded_steps, fenced = add_fenced_steps,
  fair = add_fair_steps, release_fair = add_fair_steps,
  claim = add_record_steps, extend = add_record_steps, complete = add_record_steps, forget = add_record_steps,
  abandon = add_record_steps, claim_slot = add_record_steps, look_at_record = add_record_steps,
  forget_record = add_record_steps,
}
local has_all = false

-- The steps that run.lua does not have itself, this one among them.
function others(what)
  if has_all then return steps, acquire_as end
  if family_of[what] then
    if not (steps[what] or acquire_as[what]) then family_of[what]() end
    return steps, acquire_as
  end
  has_all = true
  add_lock_steps()
  add_record_steps()
  add_quorum_steps()
  add_read_write_steps()
  add_several_steps()
  add_fair_steps()
  add_fenced_steps()
  add_crowded_steps()
  add_counter_steps(add_permit_steps())
  add_entry_steps()
  return steps, acquire_as
end

return {
  attempt = attempt, busy = busy, is_error = is_error, is_wrong_type = is_wrong_type, others = others, reserve = reserve,
  released = released, tell = tell, undo = undo,
}
