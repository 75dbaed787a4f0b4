-- ARGV: incarnation, step, near the memory limit (1), ids (none: the oldest B)
-- Returns {state, waiting_for, replay, queued, running, completed, entries}.
fence(ARGV[1])
local step = tonumber(ARGV[2])
local limit = limits()

local function answer(state, why, replay, entries)
  if state == 'waiting' then wait_for('take') end
  return {state, why, replay, count('train:queued'), count('train:running'),
    count('train:completed'), entries or {}}
end

if step <= limit.last_taken then
  if step <= limit.let_go then
    fail('WrongStep', 'TakeBatch step ' .. int(step) .. ': its payload was let go; the oldest ' ..
      'step still kept is ' .. int(limit.let_go + 1))
  end
  local first = call('HGET', P .. 'batch_incarnations', int(step))
  return answer('taken', '', first ~= ARGV[1] and 1 or 0,
    call('LRANGE', P .. 'batch:' .. int(step), 0, -1))
end
if step ~= limit.last_taken + 1 then
  fail('WrongStep', 'TakeBatch step ' .. int(step) .. ': the next step is ' ..
    int(limit.last_taken + 1))
end

-- The first call for a step: version step - 1 is confirmed, which opens admission.
if meta('take_step') ~= step then
  call('HSET', META, 'take_step', int(step), 'take_since', int(NOW))
end
if limit.version < step - 1 then
  limit.version = step - 1
  call('HSET', META, 'policy_version', int(limit.version))
  wake('lease')
end
if ARGV[3] == '1' and limit.last_taken > limit.last_committed then
  return answer('checkpoint_first', 'the ledger is near its memory limit: save a checkpoint and ' ..
    'commit step ' .. int(limit.last_taken), 0)
end

local oldest = step - 1 - limit.eta
local late = NOW - meta('take_since') >= CONFIG.straggler_deadline_ms

local function too_stale(task)
  return end_attempt(task, 'too_stale', 'head version ' .. int(task.head) .. ' at step ' ..
    int(step) .. ', at least ' .. int(oldest) .. ' is needed')
end

-- Gives up on running groups that can no longer be fresh enough.
local function revoke(highest_floor)
  for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'floors', '-inf', int(highest_floor))) do
    local task = read_task(id)
    call('HSET', task.key, 'revoked', 1)
    call('HDEL', task.key, 'partial')
    end_attempt(task, 'too_stale', 'still running at the straggler deadline of step ' ..
      int(step) .. ', leased at version ' .. int(task.floor))
  end
end

local function batch(tasks)
  local entries, staleness, highest = {}, 0, meta('staleness_max')
  for i, task in ipairs(tasks) do
    entries[i] = task.id .. '\n' .. int(task.head) .. '\n' .. task.lengths
    staleness = staleness + step - 1 - task.head
    highest = math.max(highest, step - 1 - task.head)
    call('HSET', task.key, 'step', int(step))
    call('RPUSH', P .. 'batch:' .. int(step), entries[i])
    move(task, 'batched')
  end
  call('HINCRBY', META, 'staleness_sum', int(staleness))
  call('HINCRBY', META, 'staleness_count', #tasks)
  call('HSET', META, 'staleness_max', int(highest), 'last_taken', int(step),
    'last_size', #tasks)
  call('HSET', P .. 'batch_incarnations', int(step), ARGV[1])
  dissolve_wanted()
  return answer('taken', '', 0, entries)
end

if #ARGV > 3 then return take_named(step, oldest, too_stale, batch, answer) end

if (call('HGET', META, 'want') or '') ~= '' then dissolve_wanted() end
for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'completed', '-inf',
  '(' .. int(math.max(oldest, 0) * HEAD_UNIT))) do
  too_stale(read_task(id))
end
if late then revoke(oldest - 1) end

local size = count('train:completed')
if size < limit.batch_size then
  local open = count('train:queued') + count('train:running')
  if meta('sealed') == 0 or open > 0 then
    local _, admission_now = admission(limit)
    return answer('waiting', int(size) .. ' of ' .. int(limit.batch_size) .. ' groups are ' ..
      'completed; ' .. int(count('train:queued')) .. ' queued; ' .. admission_now, 0)
  end
  if size == 0 then return answer('exhausted', 'sealed, and every task has ended', 0) end
else
  local stragglers = call('ZCOUNT', P .. 'floors', '-inf', int(oldest))
  if stragglers > 0 and not late then
    return answer('waiting', int(stragglers) .. ' running groups leased at version ' ..
      int(oldest) .. ' or before, which would be too stale for the next batch', 0)
  end
  if stragglers > 0 then revoke(oldest) end
end

local tasks = {}
for i, id in ipairs(call('ZRANGE', P .. 'completed', 0, limit.batch_size - 1)) do
  tasks[i] = read_task(id)
end
return batch(tasks)
