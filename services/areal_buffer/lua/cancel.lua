-- ARGV: incarnation, reason, purpose ('': the ids that follow), ids...
-- Returns how many were cancelled; by purpose at most 500 a call.
if ARGV[1] ~= '0' then fence(ARGV[1]) end
local ids, purpose = {}, ARGV[3]
if purpose == '' then
  for i = 4, #ARGV do ids[#ids + 1] = ARGV[i] end
else
  local sources = {'queue:' .. purpose, 'running:' .. purpose}
  if purpose == 'train' then
    sources[#sources + 1] = 'queue:wanted'
    sources[#sources + 1] = 'completed'
  end
  for _, source in ipairs(sources) do
    for _, id in ipairs(look('ZRANGE', P .. source, 0, 499 - #ids)) do ids[#ids + 1] = id end
    if #ids >= 500 then break end
  end
end
local cancelled = 0
for _, id in ipairs(ids) do
  local task = read_task(id)
  if task and ALLOWED[task.state .. '>cancelled'] then
    move(task, 'cancelled', {'reason', ARGV[2]})
    cancelled = cancelled + 1
  end
end
return cancelled
