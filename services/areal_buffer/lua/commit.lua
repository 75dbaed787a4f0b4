-- ARGV: incarnation, step, oldest retained step
-- Returns the last committed step.
fence(ARGV[1])
local step, retained = tonumber(ARGV[2]), tonumber(ARGV[3])
local meta = read_meta()
if step > meta.last_taken then
  fail('WrongStep', 'CommitStep ' .. int(step) .. ': the last step taken is ' ..
    int(meta.last_taken))
end
local function ids(of_step)
  local found = {}
  for i, entry in ipairs(call('LRANGE', P .. 'batch:' .. int(of_step), 0, -1)) do
    found[i] = string.match(entry, '^[^\n]+')
  end
  return found
end
for each = meta.last_committed + 1, step do
  for _, id in ipairs(ids(each)) do move(read_task(id), 'trained') end
end
for each = meta.let_go + 1, retained do
  for _, id in ipairs(ids(each)) do
    delete(P .. 'group:' .. id)
    call('HDEL', P .. 'task:' .. id, 'body', 'partial', 'failed_servers', 'lengths', 'head',
      'worker', 'floor', 'want', 'deadline', 'reason', 'done_token')
  end
  delete(P .. 'batch:' .. int(each))
  call('HDEL', P .. 'batch_incarnations', int(each))
end
local committed = math.max(step, meta.last_committed)
set(META, 'last_committed', int(committed))
set(META, 'let_go', int(math.max(retained, meta.let_go)))
return committed
