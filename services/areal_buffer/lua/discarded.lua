-- ARGV: incarnation, step, entries to pass over, bytes of a message
-- Returns {how many there are, those that fill a message}: entries of the step, or, of the one whose batch
-- would be taken next, those so far.
fence(ARGV[1])
local step, meta = tonumber(ARGV[2]), read_meta()
if step <= meta.let_go then
  fail('WrongStep', 'step ' .. int(step) .. ': its list of discarded groups has been released')
end
local key = P .. 'discarded' .. (step <= meta.last_taken and ':' .. int(step) or '')
if step > meta.last_taken + 1 then return {0, {}} end
local entries, bytes = call('LRANGE', key, ARGV[3], ARGV[3] + 999), 0
local found = {}
for i, entry in ipairs(entries) do
  found[i] = entry
  bytes = bytes + #entry + call('STRLEN', P .. 'spare:' .. string.match(entry, '^[^\n]+'))
  if bytes >= tonumber(ARGV[4]) then break end
end
return {call('LLEN', key), found}
