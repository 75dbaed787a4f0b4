-- ARGV: incarnation, step, memory limit in bytes, bytes of payloads to bring along, refill
--       below (so many queued), version that a server serves, ids (none: the oldest B)
-- Returns {state, waiting_for, replay, queued, running, completed, rows are wanted (1), payloads of
-- the first groups, entries}.
fence(ARGV[1])
local step = tonumber(ARGV[2])
local meta = read_meta()
refuse_if_stopped(meta)
local refill_below = meta.sealed == 0 and tonumber(ARGV[5]) or 0

local function answer(state, why, replay, entries)
  if state == 'waiting' then
    wait_for('take')
    -- Leases make the queue shorter: lease.lua looks at this.
    if meta.refill_below ~= refill_below then set(META, 'refill_below', int(refill_below)) end
  end
  local payloads, bytes = {}, 0
  for i, entry in ipairs(entries or {}) do
    local key = P .. 'group:' .. string.match(entry, '^[^\n]+')
    bytes = bytes + call('STRLEN', key)
    if bytes > tonumber(ARGV[4]) then break end
    payloads[i] = call('GET', key)
  end
  local queued, running, completed = count('train:queued', 'train:running', 'train:completed')
  local wanted = state == 'waiting' and queued < refill_below and 1 or 0
  return {state, why, replay, queued, running, completed, wanted, payloads, entries or {}}
end

if step <= meta.last_taken then
  if step <= meta.let_go then
    fail('WrongStep', 'TakeBatch step ' .. int(step) .. ': its payload was released; the oldest ' ..
      'step still kept is ' .. int(meta.let_go + 1))
  end
  local first = call('HGET', P .. 'batch_incarnations', int(step))
  return answer('taken', '', first ~= ARGV[1] and 1 or 0,
    call('LRANGE', P .. 'batch:' .. int(step), 0, -1))
end
if step ~= meta.last_taken + 1 then
  fail('WrongStep', 'TakeBatch step ' .. int(step) .. ': the next step is ' ..
    int(meta.last_taken + 1))
end

-- The first call for a step. When the clock was set back since, the time for stragglers starts again.
if meta.take_step ~= step or meta.take_since > NOW then
  meta.take_since = NOW
  set(META, 'take_step', int(step))
  set(META, 'take_since', int(NOW))
end
confirm(meta, math.min(tonumber(ARGV[6]), step - 1))
-- A commit releases what was trained on, so it helps where that is most of what is held.
local function commit_helps()
  local found = look('HMGET', META, 'bytes:train', 'bytes:serve', 'bytes:spare')
  local train, serve = tonumber(found[1] or 0) - tonumber(found[3] or 0), tonumber(found[2] or 0)
  return train + serve >= 0.9 * tonumber(ARGV[3]) and train >= serve
end
if meta.last_taken > meta.last_committed and commit_helps() then
  return answer('checkpoint_first', 'the ledger is near its memory limit: save a checkpoint and ' ..
    'commit step ' .. int(meta.last_taken), 0)
end

local oldest = step - 1 - meta.max_head_offpolicyness
local late = NOW - meta.take_since >= CONFIG.straggler_deadline_ms

local function too_stale(task)
  return end_attempt(task, 'too_stale', 'head version ' .. int(task.head) .. ' at step ' ..
    int(step) .. ', at least ' .. int(oldest) .. ' is needed')
end

-- Gives up on running groups that can no longer be fresh enough.
local function revoke(highest_floor)
  for _, id in ipairs(look('ZRANGEBYSCORE', P .. 'floors', '-inf', int(highest_floor))) do
    local task = read_task(id)
    call('HSET', task.key, 'revoked', 1)
    drop_journal(task)
    end_attempt(task, 'too_stale', 'still running at the straggler deadline of step ' ..
      int(step) .. ', leased at version ' .. int(task.floor))
  end
end

local function batch(tasks)
  local entries, staleness, highest = {}, 0, meta.staleness_max
  for i, task in ipairs(tasks) do
    entries[i] = task.id .. '\n' .. int(task.head) .. '\n' .. task.lengths .. '\n' ..
      int(task.since) .. '\n' .. int(math.max(0, task.size - record_bytes(task)) + task.payload)
    staleness = staleness + step - 1 - task.head
    highest = math.max(highest, step - 1 - task.head)
    move(task, 'batched', {'step', int(step)})
  end
  call_all('RPUSH', P .. 'batch:' .. int(step), entries)
  if call('EXISTS', P .. 'discarded') == 1 then
    call('RENAME', P .. 'discarded', P .. 'discarded:' .. int(step))
  end
  add(META, 'staleness_sum', staleness)
  add(META, 'staleness_count', #tasks)
  set(META, 'staleness_max', int(highest))
  set(META, 'last_taken', int(step))
  set(META, 'size_before', int(meta.last_size))
  set(META, 'last_size', #tasks)
  call('HSET', P .. 'batch_incarnations', int(step), ARGV[1])
  dissolve_wanted()
  return answer('taken', '', 0, entries)
end

if #ARGV > 6 then return take_named(meta, step, oldest, too_stale, batch, answer) end

if meta.want ~= '' then dissolve_wanted() end
for _, id in ipairs(look('ZRANGEBYSCORE', P .. 'completed', '-inf',
  '(' .. int(math.max(oldest, 0) * HEAD_UNIT))) do
  too_stale(read_task(id))
end
if late then revoke(oldest - 1) end

local size, queued, running = count('train:completed', 'train:queued', 'train:running')
if size < meta.batch_size then
  if meta.sealed == 0 or queued + running > 0 then
    local _, admission_now = admission(meta)
    return answer('waiting', int(size) .. ' of ' .. int(meta.batch_size) .. ' groups are ' ..
      'completed; ' .. int(queued) .. ' queued; ' .. admission_now, 0)
  end
  if size == 0 then return answer('exhausted', 'sealed, and every task has ended', 0) end
else
  local stragglers = look('ZCOUNT', P .. 'floors', '-inf', int(oldest))
  if stragglers > 0 and not late then
    return answer('waiting', int(stragglers) .. ' running groups leased at version ' ..
      int(oldest) .. ' or before, which would be too stale for the next batch', 0)
  end
  if stragglers > 0 then revoke(oldest) end
end

local tasks = {}
for i, id in ipairs(look('ZRANGE', P .. 'completed', 0, meta.batch_size - 1)) do
  tasks[i] = read_task(id)
end
return batch(tasks)
