-- ARGV: id, token, payload, head version (-1: no token was sampled), lengths, trajectories,
--       generated tokens, near the memory limit (1)
-- Returns 1: recorded, 0: had been recorded before.
local task = task_or_fail(ARGV[1])
if tonumber(ARGV[2]) == task.done_token then return 0 end
check_lease(task, ARGV[2])
local head = tonumber(ARGV[4])
if task.purpose == 'train' then
  if head < 0 then
    fail('InvalidInput', 'group ' .. task.id .. ': no token was sampled by the policy')
  end
  if head < task.floor then
    fail('InvalidInput', 'group ' .. task.id .. ' token_versions: a token was sampled at version ' ..
      int(head) .. ', the lease was given at ' .. int(task.floor))
  end
end
-- Above the limit only what the next batch needs is let in: the trainer can always go on, and
-- at most B groups pass the limit.
if ARGV[8] == '1' and
  (task.purpose == 'serve' or count('train:completed') >= limits().batch_size) then
  fail('CapacityExceeded', 'task ' .. task.id ..
    ': the ledger is near its memory limit; keep the lease and complete again later')
end

task.head = math.max(head, 0)
call('HSET', task.key, 'done_token', ARGV[2], 'head', int(task.head), 'lengths', ARGV[5])
call('HDEL', task.key, 'partial')
call('HINCRBY', META, 'trajectories', ARGV[6])
call('HINCRBY', META, 'generated_tokens', ARGV[7])
if task.purpose == 'serve' then
  call('SET', P .. 'group:' .. task.id, ARGV[3], 'PX', CONFIG.serve_result_ttl_ms)
  move(task, 'delivered')
else
  call('SET', P .. 'group:' .. task.id, ARGV[3])
  move(task, 'completed')
end
return 1
