-- KEYS, after the prefix: where the payload of each group was put by the same transaction.
-- ARGV: memory limit in bytes, then of each group: id, token, head version (-1: no token was sampled),
--       lengths, trajectories, generated tokens, bytes
-- Returns for each 1: recorded, 0: had been recorded before, or the error it was refused with.
-- Every check of a group comes before the first write, so a refused one changes nothing.
local LIMIT = tonumber(ARGV[1])

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
        int(head) .. ', but the task was leased at version ' .. int(task.floor))
    end
  end
  -- Results for clients leave a tenth to the trainer and its evaluations, for which it waits. Above
  -- the limit only what the next batch needs is let in: the trainer can always continue, and at most B
  -- groups pass the limit, and B of an evaluation.
  local serve, bytes = task.purpose == 'serve', tonumber(ARGV[at + 6])
  local clients = serve and task.trainer ~= '1'
  if not make_room((clients and 0.9 or 1) * LIMIT - 1) then
    local meta = read_meta()
    local size = meta.batch_size
    if clients or serve and held() >= LIMIT + size * bytes then
      fail('CapacityExceeded', 'task ' .. task.id .. ': the ledger is near its memory limit; keep the lease' ..
        again())
    -- The next batch waits for those that would be too stale for the one after it.
    elseif not serve and task.floor > meta.last_taken - meta.max_head_offpolicyness and
      count('train:completed') >= size then
      fail('CapacityExceeded', 'task ' .. task.id ..
        ': the ledger is near its memory limit; keep the lease; try again in 1 s')
    end
  end

  task.head = math.max(head, 0)
  move(task, serve and 'delivered' or 'completed', {'done_token', token, 'head', int(task.head),
    'lengths', ARGV[at + 3], 'payload', int(bytes)})
  note_end(task)
  drop_journal(task)
  hold(task.purpose, bytes)
  add(META, 'trajectories', ARGV[at + 4])
  add(META, 'generated_tokens', ARGV[at + 5])
  call('RENAME', payload, P .. 'group:' .. task.id)
  return 1
end

local results = {}
for number = 1, #KEYS - 1 do
  local payload = KEYS[number + 1]
  local result = result_or_refusal(complete, 7 * number - 5, payload)
  if result ~= 1 then delete(payload) end
  results[number] = result
end
return results
