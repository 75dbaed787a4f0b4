-- ARGV: incarnation, step, bytes of a message, ids
-- Returns how many of these groups, from the first, fill a message. Their payloads are read beside the
-- script, which would copy each several times: they stay as they are until they are released.
fence(ARGV[1])
local bytes = 0
for i = 4, #ARGV do
  local id = ARGV[i]
  if call('HGET', P .. 'task:' .. id, 'step') ~= ARGV[2] then
    fail('NotFound', 'task ' .. id .. ': not part of the batch of step ' .. ARGV[2])
  end
  local size = call('STRLEN', P .. 'group:' .. id)
  if size == 0 then
    fail('NotFound', 'task ' .. id .. ': its group of step ' .. ARGV[2] .. ' was released')
  end
  bytes = bytes + size
  if bytes >= tonumber(ARGV[3]) then return i - 3 end
end
return #ARGV - 3
