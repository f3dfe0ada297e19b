
-- What became of an acquire that is not as simple as it should be.
local function busy(key, left)
  if is_error(left) then error({ failed = left.err }) end
  -- It may have ended since its time was asked for.
  if not holder_of(key) then return -2 end
  return -2 - left
end

-- All steps that run.lua does not have itself.
local function others()
  if not steps then
    steps = {}
    add_lock_steps()
    add_record_steps()
    add_quorum_steps()
    add_read_write_steps()
    add_several_steps()
    add_fair_steps()
    add_fenced_steps()
    add_counter_steps(add_permit_steps())
  end
  return steps, acquire_as
end

return { busy = busy, undo = undo, is_wrong_type = is_wrong_type, others = others }
