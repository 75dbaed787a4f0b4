-- Shared by every script: keys, the state machine `move`, admission, fencing, wake-ups.
-- ALLOWED (transitions) and CONFIG (limits) are generated in front of this file.
--
--   meta               hash    versions, steps, sequence numbers, limits, totals
--   counts             hash    tasks per state: "all:queued", "train:queued", ...
--   task:<id>          hash    the record
--   group:<id>         string  serialized TrajectoryGroup
--   staged:<n>         string  the same on its way in: within one transaction only
--   queue:<which>      zset    queued tasks by sequence number; which: train, serve, wanted
--   running:<purpose>  zset    running tasks by lease expiry (ms)
--   floors             zset    running train tasks by the oldest version their tokens may have
--   completed          zset    train groups by (head version, sequence number)
--   deadlines          zset    queued and running tasks with a time to live, by its end (ms)
--   dead               zset    dead letters by time (ms)
--   batch:<step>       list    "id \n head version \n lengths" of each group
--   batch_incarnations hash    step -> incarnation that took it first
--   seen:<epoch>       bitmap  dataset positions submitted
--   life:<worker>      string  its newest life (of workers whose name outlives them); goes after a day

local P = KEYS[1]
local META, COUNTS = P .. 'meta', P .. 'counts'
local call = redis.call
local NOW
do
  local time = call('TIME')
  NOW = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
-- Score of a completed group: head version first, so that only stragglers can become too stale.
local HEAD_UNIT = 4294967296

local LIVE = {queued = true, running = true, completed = true, batched = true}

-- A number as an integer string, whatever its size.
local function int(number) return string.format('%.0f', number) end

-- Ends the script with areal.errors.<kind>.
local function fail(kind, message) error({err = 'AREAL ' .. kind .. ' ' .. message}) end

local function meta(field) return tonumber(call('HGET', META, field) or 0) end

local function count(which) return tonumber(call('HGET', COUNTS, which) or 0) end

-- Refuses every incarnation but the newest.
local function fence(incarnation)
  local current = meta('incarnation')
  if tonumber(incarnation) ~= current then
    fail('StaleIncarnation', 'trainer incarnation ' .. incarnation .. ': the current one is ' ..
      int(current) .. '; a newer trainer has registered, this one must stop')
  end
end

-- Tells waiting calls that `kind` may have become possible. The one who waits sets the flag in
-- the same script that found nothing, so nothing is published while nobody waits.
local FLAGS = nil
local function wake(kind)
  if not FLAGS then
    local values = call('HMGET', META, 'waiting:lease', 'waiting:take', 'waiting:ended')
    FLAGS = {lease = values[1] == '1', take = values[2] == '1', ended = values[3] == '1'}
  end
  if FLAGS[kind] then
    FLAGS[kind] = false
    call('HSET', META, 'waiting:' .. kind, '0')
    call('PUBLISH', P .. 'wake', kind)
  end
end

local function wait_for(kind) call('HSET', META, 'waiting:' .. kind, '1') end

local FIELDS = {'state', 'purpose', 'seq', 'token', 'done_token', 'floor', 'want', 'deadline',
  'head', 'lengths', 'step', 'reason', 'revoked'}
local NUMBERS = {seq = true, token = true, done_token = true, floor = true, deadline = true,
  head = true, step = true}

-- The record's small fields, or nil. Absent numbers are 0, absent strings ''.
local function read_task(id)
  local values = call('HMGET', P .. 'task:' .. id, unpack(FIELDS))
  if not values[1] then return nil end
  local task = {id = id, key = P .. 'task:' .. id}
  for i, field in ipairs(FIELDS) do
    if NUMBERS[field] then task[field] = tonumber(values[i] or 0)
    else task[field] = values[i] or '' end
  end
  return task
end

local function task_or_fail(id)
  return read_task(id) or fail('NotFound', 'task ' .. id .. ': unknown')
end

local function enter_queue(task)
  local which = task.purpose
  if task.want ~= '' and task.want == (call('HGET', META, 'want') or '') then which = 'wanted' end
  call('ZADD', P .. 'queue:' .. which, int(task.seq), task.id)
  if task.deadline > 0 then call('ZADD', P .. 'deadlines', int(task.deadline), task.id) end
end

-- Drops what only living tasks need. Ended train tasks keep a small record, so that their id
-- stays taken; serve tasks go altogether when their time has come.
local function enter_end(task, to)
  call('HSET', task.key, 'ended', int(NOW))
  if task.deadline > 0 then call('ZREM', P .. 'deadlines', task.id) end
  if to == 'dead_lettered' then
    call('ZADD', P .. 'dead', int(NOW), task.id)
    call('HDEL', task.key, 'partial')
  elseif task.purpose == 'serve' then
    call('PEXPIRE', task.key, CONFIG.serve_result_ttl_ms)
  elseif to ~= 'trained' then
    call('HDEL', task.key, 'body', 'partial', 'failed_servers')
  end
  if to ~= 'trained' and to ~= 'delivered' then call('DEL', P .. 'group:' .. task.id) end
end

-- The only place where a task changes state: checks the transition, keeps the counters adding up
-- to the number submitted, keeps the indexes, wakes who waits. `score` for running: lease expiry.
local function move(task, to, score)
  local from = task.state
  if from == 'new' then
    call('HINCRBY', META, 'submitted', 1)
  else
    if not ALLOWED[from .. '>' .. to] then
      fail('LeaseLost', 'task ' .. task.id .. ' is ' .. from .. ': cannot become ' .. to)
    end
    call('HINCRBY', COUNTS, 'all:' .. from, -1)
    call('HINCRBY', COUNTS, task.purpose .. ':' .. from, -1)
  end
  call('HINCRBY', COUNTS, 'all:' .. to, 1)
  call('HINCRBY', COUNTS, task.purpose .. ':' .. to, 1)
  call('HSET', task.key, 'state', to)
  task.state = to

  if from == 'queued' then
    if call('ZREM', P .. 'queue:' .. task.purpose, task.id) == 0 then
      call('ZREM', P .. 'queue:wanted', task.id)
    end
  elseif from == 'running' then
    call('ZREM', P .. 'running:' .. task.purpose, task.id)
    call('ZREM', P .. 'floors', task.id)
  elseif from == 'completed' then
    call('ZREM', P .. 'completed', task.id)
    if to == 'queued' then call('DEL', P .. 'group:' .. task.id) end
  elseif from == 'dead_lettered' then
    call('ZREM', P .. 'dead', task.id)
    call('HDEL', task.key, 'ended')
  end

  if to == 'queued' then
    enter_queue(task)
  elseif to == 'running' then
    call('ZADD', P .. 'running:' .. task.purpose, int(score), task.id)
    if task.purpose == 'train' then call('ZADD', P .. 'floors', int(task.floor), task.id) end
  elseif to == 'completed' then
    call('ZADD', P .. 'completed', int(task.head * HEAD_UNIT + task.seq), task.id)
    if task.deadline > 0 then call('ZREM', P .. 'deadlines', task.id) end
  elseif not LIVE[to] then
    enter_end(task, to)
  end

  if to == 'queued' or from == 'running' or (from == 'completed' and to ~= 'batched') then
    wake('lease')
  end
  if to ~= 'batched' and to ~= 'trained' and (from == 'running' or to == 'completed' or not LIVE[to])
  then
    wake('take')
    wake('ended')
  end
end

local ATTEMPTS = {
  workflow_error = {field = 'attempts', limit = CONFIG.max_attempts},
  suspected_poison = {field = 'infra', limit = CONFIG.max_infrastructure_attempts},
  too_stale = {field = 'regen', limit = CONFIG.max_regenerations + 1},
}

-- Ends an attempt: back to the front of the queue, or to the dead letters once the limit of that
-- cause is reached. An empty cause counts against nothing.
local function end_attempt(task, cause, detail, traceback)
  call('HSET', task.key, 'reason', detail)
  if cause ~= '' then
    local limit = ATTEMPTS[cause]
    local attempts = call('HINCRBY', task.key, limit.field, 1)
    if cause == 'too_stale' then call('HINCRBY', META, 'regenerated', 1) end
    if attempts >= limit.limit then
      call('HSET', task.key, 'cause', cause, 'traceback', traceback or '',
        'reason', cause .. ' after ' .. int(attempts) .. ': ' .. detail)
      move(task, 'dead_lettered')
      return
    end
  end
  move(task, 'queued')
end

local function limits()
  local values = call('HMGET', META, 'policy_version', 'last_taken', 'last_committed', 'let_go',
    'batch_size', 'max_head_offpolicyness', 'max_concurrent_rollouts')
  return {
    version = tonumber(values[1] or 0),
    last_taken = tonumber(values[2] or 0),
    last_committed = tonumber(values[3] or 0),
    let_go = tonumber(values[4] or 0),
    batch_size = tonumber(values[5] or CONFIG.batch_size),
    eta = tonumber(values[6] or CONFIG.max_head_offpolicyness),
    max_concurrent = tonumber(values[7] or CONFIG.max_concurrent_rollouts),
  }
end

-- Groups that may still start: areal.staleness.admission_headroom.
local function admission(limit)
  -- Only the newest batch can be ahead. It counts until the version moves, even if committed and
  -- let go by then: what starts now starts from the weights before it.
  local ahead = limit.last_taken > limit.version and meta('last_size') or 0
  local running, completed = count('train:running'), count('train:completed')
  local headroom = (limit.eta + 1) * limit.batch_size - running - completed - ahead
  return headroom, 'admission: ' .. int(running) .. ' running + ' .. int(completed) ..
    ' completed + ' .. int(ahead) .. ' batched ahead of version ' .. int(limit.version) ..
    ', at most (' .. int(limit.eta) .. ' + 1) * ' .. int(limit.batch_size)
end

-- The first call of a worker's newer life ends all leases of the lives before: nobody works on them.
-- Each holds few leases, so one script can; an older life that still speaks is refused.
local function begin_life(worker, boot)
  local key = P .. 'life:' .. worker
  local known = tonumber(call('GET', key) or 0)
  -- Pods get new names for ever, so what is known of one goes a day after it was last heard of.
  if boot > known or call('TTL', key) < 43200 then
    call('SET', key, int(math.max(boot, known)), 'EX', 86400)
  end
  if boot == known then return end
  if boot < known then
    fail('LeaseLost', 'worker ' .. worker .. ': a newer process of this name has begun; this one must stop')
  end
  if known == 0 then return end
  for _, purpose in ipairs({'train', 'serve'}) do
    for _, id in ipairs(call('ZRANGE', P .. 'running:' .. purpose, 0, -1)) do
      if call('HGET', P .. 'task:' .. id, 'worker') == worker then
        end_attempt(read_task(id), 'suspected_poison', 'worker ' .. worker .. ' died and was started again')
      end
    end
  end
end

-- The lease's token must be the newest given for the task, and the task still be open.
local function check_lease(task, token)
  if tonumber(token) ~= task.token or (task.state ~= 'running' and task.state ~= 'queued') then
    fail('LeaseLost', 'task ' .. task.id .. ': lease ' .. token .. ' no longer holds; the task is ' ..
      task.state .. (task.token > 0 and ', its newest lease is ' .. int(task.token) or ''))
  end
end

-- Forgets the list that rollout_batch waits for: its tasks queue like any other.
local function dissolve_wanted()
  for _, id in ipairs(call('ZRANGE', P .. 'queue:wanted', 0, -1)) do
    call('ZADD', P .. 'queue:train', call('ZSCORE', P .. 'queue:wanted', id), id)
  end
  call('DEL', P .. 'queue:wanted')
  call('HSET', META, 'want', '')
end
