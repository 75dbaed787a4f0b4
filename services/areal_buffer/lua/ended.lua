-- ARGV: incarnation of the trainer that waits (0: someone else), ids
-- Returns those that have ended (train: completed counts); when none, flags the wait.
if ARGV[1] ~= '0' then refuse_if_stopped(read_meta()) end
local ended = {}
for i = 2, #ARGV do
  local id = ARGV[i]
  local state = call('HGET', P .. 'task:' .. id, 'state')
  if not state then fail('NotFound', 'task ' .. id .. ': unknown, or released since it ended') end
  if state ~= 'queued' and state ~= 'running' then ended[#ended + 1] = id end
end
if #ended == 0 then wait_for('ended') end
return ended
