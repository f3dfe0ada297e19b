
-- Takes the steps in their order, see steps.lua.

local replies = { digits(now) }
local at, step = 1, 1
while ARGV[at] do
  local count = tonumber(ARGV[at + 1])
  if not steps[ARGV[at]] then add_record_steps() end
  local ok, reply = pcall(steps[ARGV[at]], KEYS[step + 1], unpack(ARGV, at + 2, at + 1 + count))
  if not ok then
    if type(reply) ~= 'table' then
      reply = { 'failed', tostring(reply) }
    elseif reply.taken then
      reply = { 'taken', reply.taken }
    else
      reply = { 'failed', tostring(reply.failed or reply.err) }
    end
  end
  step = step + 1
  replies[step] = reply
  at = at + 2 + count
end
return replies
