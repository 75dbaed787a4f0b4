-- KEYS, after the prefix: where the payload of each group was put by the same transaction.
-- ARGV, of each group: id, token, head version (-1: no token was sampled), lengths, trajectories,
--       generated tokens, passes the memory limit (1)
-- Returns for each 1: recorded, 0: had been recorded before, or the error it was refused with.
-- Every check of a group comes before the first write, so a refused one changes nothing.
local function complete(at, payload)
  local token, head = ARGV[at + 1], tonumber(ARGV[at + 2])
  local task = task_or_fail(ARGV[at])
  if tonumber(token) == task.done_token then return 0 end
  check_lease(task, token)
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
  if ARGV[at + 6] == '1' and
    (task.purpose == 'serve' or count('train:completed') >= read_meta().batch_size) then
    fail('CapacityExceeded', 'task ' .. task.id ..
      ': the ledger is near its memory limit; keep the lease and complete again later')
  end

  task.head = math.max(head, 0)
  local serve = task.purpose == 'serve'
  move(task, serve and 'delivered' or 'completed',
    {'done_token', token, 'head', int(task.head), 'lengths', ARGV[at + 3]})
  note_end(task)
  call('HDEL', task.key, 'partial')
  add(META, 'trajectories', ARGV[at + 4])
  add(META, 'generated_tokens', ARGV[at + 5])
  local key = P .. 'group:' .. task.id
  call('RENAME', payload, key)
  if serve then call('PEXPIRE', key, CONFIG.serve_result_ttl_ms) end
  return 1
end

local results = {}
for number = 1, #KEYS - 1 do
  local payload = KEYS[number + 1]
  local result = result_or_refusal(complete, 7 * number - 6, payload)
  if result ~= 1 then delete(payload) end
  results[number] = result
end
return results
