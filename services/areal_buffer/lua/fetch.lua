-- ARGV: incarnation, step, bytes after which to stop, ids
-- Returns the payloads of the first ids, at least one.
fence(ARGV[1])
local payloads, bytes = {}, 0
for i = 4, #ARGV do
  local id = ARGV[i]
  if call('HGET', P .. 'task:' .. id, 'step') ~= ARGV[2] then
    fail('NotFound', 'task ' .. id .. ': not part of the batch of step ' .. ARGV[2])
  end
  local payload = call('GET', P .. 'group:' .. id)
  if not payload then
    fail('NotFound', 'task ' .. id .. ': its group of step ' .. ARGV[2] .. ' was let go')
  end
  payloads[#payloads + 1] = payload
  bytes = bytes + #payload
  if bytes >= tonumber(ARGV[3]) then break end
end
return payloads
