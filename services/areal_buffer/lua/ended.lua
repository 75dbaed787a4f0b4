-- ARGV: ids
-- Returns those that have ended (train: completed counts); when none, flags the wait.
local ended = {}
for _, id in ipairs(ARGV) do
  local state = call('HGET', P .. 'task:' .. id, 'state')
  if not state then fail('NotFound', 'task ' .. id .. ': unknown') end
  if state ~= 'queued' and state ~= 'running' then ended[#ended + 1] = id end
end
if #ended == 0 then wait_for('ended') end
return ended
