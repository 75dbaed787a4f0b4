-- ARGV: incarnation, step, oldest retained step
-- Returns the last committed step.
fence(ARGV[1])
local step, retained = tonumber(ARGV[2]), tonumber(ARGV[3])
local meta = read_meta()
if step > meta.last_taken then
  fail('WrongStep', 'CommitStep ' .. int(step) .. ': the last step taken is ' ..
    int(meta.last_taken))
end
local function entries(of_step) return call('LRANGE', P .. 'batch:' .. int(of_step), 0, -1) end
for each = meta.last_committed + 1, step do
  for _, entry in ipairs(entries(each)) do move(read_task(string.match(entry, '^[^\n]+')), 'trained') end
end
for each = meta.let_go + 1, retained do
  for _, entry in ipairs(entries(each)) do
    local id = string.match(entry, '^[^\n]+')
    local key = P .. 'task:' .. id
    delete(P .. 'group:' .. id)
    -- What is left is there as long as the trial: its id stays taken.
    call('HDEL', key, 'body', 'partial', 'failed_servers', 'lengths', 'head', 'size', 'payload', 'worker',
      'want', 'deadline', 'reason', 'done_token', 'since', 'trainer', 'submitted')
    -- What they were counted with is its last part, where it has five.
    local counted = string.match(entry, '^[^\n]+\n[^\n]*\n[^\n]*\n[^\n]*\n(%d+)$')
    hold('train', -tonumber(counted or 0))
    -- The one who opens a session again is told its version, however late.
    if not call('HGET', key, 'sessions') then
      call('HDEL', key, 'floor', 'seq', 'token', 'revoked')
      if counted then hold('train', CONFIG.ended_bytes - RECORD) end
    end
    compact(key)
  end
  for _, entry in ipairs(call('LRANGE', P .. 'discarded:' .. int(each), 0, -1)) do
    drop_spare(string.match(entry, '^[^\n]+'))
  end
  delete(P .. 'discarded:' .. int(each))
  delete(P .. 'batch:' .. int(each))
  call('HDEL', P .. 'batch_incarnations', int(each))
end
local committed = math.max(step, meta.last_committed)
set(META, 'last_committed', int(committed))
set(META, 'let_go', int(math.max(retained, meta.let_go)))
return committed
