
-- Families of steps that can be made without all others, which takes longer than any of these steps. A family may bring
-- further steps, which are incomplete until all are made.
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
  local family = family_of[what]
  if has_all or family and (steps[what] or acquire_as[what]) then return steps, acquire_as end
  if family then
    family()
  else
    has_all = true
    add_lock_steps()
    add_record_steps()
    add_fair_steps()
    add_fenced_steps()
    add_crowded_steps()
    add_rarer_steps()
  end
  return steps, acquire_as
end

return {
  attempt = attempt, busy = busy, is_error = is_error, is_wrong_type = is_wrong_type, others = others, reserve = reserve,
  released = released, tell = tell, undo = undo,
}
