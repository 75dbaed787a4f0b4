-- Shared by every script: keys, the state machine `move`, admission, fencing, wake-ups.
-- ALLOWED (transitions) and CONFIG (limits) are generated in front of this file.
--
--   meta               hash    versions, steps, sequence numbers, limits, totals
--   counts             hash    tasks per state: "all:queued", "train:queued", ...
--   task:<id>          hash    the record
--   group:<id>         string  serialized TrajectoryGroup
--   staged:<n>         string  the same on its way in: within one transaction only
--   queue:<which>      zset    queued tasks by sequence number; which: train, serve, wanted
--   calls:<id>/<n>     hash    what the agent of a session did in attempt n, while its task runs
--   running:<purpose>  zset    running tasks by lease expiry (ms)
--   floors             zset    running train tasks by the oldest version their tokens may have
--   completed          zset    train groups by (head version, sequence number)
--   results            zset    serve tasks that have ended (but dead letters), by when (ms)
--   read               zset    those whose result has been read, by when (ms), until it goes
--   deadlines          zset    queued and running tasks with a time to live, by its end (ms)
--   dead               zset    dead letters by time (ms)
--   batch:<step>       list    "id \n head version \n lengths" of each group
--   discarded          list    "id/lease \n outcome \n reason" of train tasks that lost a group or ended
--                              without being trained on, since the newest batch
--   discarded:<step>   list    the same of those between the batches of the step before and this step
--   spare:<id>/<lease> string  the group of such a task, if it had one and there is room
--   spares             zset    the names of these groups by when (ms)
--   batch_incarnations hash    step -> incarnation that took it first
--   seen:<epoch>       bitmap  dataset positions submitted
--   failures           hash    of each kind of workflow error since the trainer registered: the first one
--   failures:attempts  hash    and how many attempts it ended
--   recipe:<digest>    hash    source of a recipe
--   recipes            zset    digests of recipes by last use (ms)
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

-- A script writes the records of tasks at once. What it changes of totals and indexes, which all its
-- tasks share, is collected here: one command then does for all of them. It is written when the
-- script ends, however it ends (main.lua), and before the script reads that key (`look`).
local FIELDS_TO_SET = {}   -- hash -> field -> value
local SUMS = {}            -- hash -> field -> what to add
local MEMBERS = {}         -- sorted set -> member -> score, or false: goes
local GONE = {}            -- keys to delete

local function collect(pending, key, name, value)
  local found = pending[key]
  if not found then
    found = {}
    pending[key] = found
  end
  found[name] = value
end

local function set(hash, field, value) collect(FIELDS_TO_SET, hash, field, value) end

local function add(hash, field, number)
  collect(SUMS, hash, field, (SUMS[hash] and SUMS[hash][field] or 0) + number)
end

local function put(index, id, score) collect(MEMBERS, P .. index, id, score) end

local function remove(index, id) collect(MEMBERS, P .. index, id, false) end

local function delete(key) GONE[#GONE + 1] = key end

-- What the ledger holds, counted where it changes: `size` of a record is that of body and stack trace,
-- and a sum for the record itself; `journal` that of partial work; `payload` that of the group.
local RECORD = CONFIG.record_bytes
local HELD = 0   -- by this script
local function hold(purpose, bytes)
  HELD = HELD + bytes
  add(META, 'bytes:' .. purpose, bytes)
end

-- A command with any number of arguments: as many at a time as Lua can pass.
local function call_all(command, key, arguments)
  for at = 1, #arguments, 1000 do
    call(command, key, unpack(arguments, at, math.min(at + 999, #arguments)))
  end
end

-- Writes what was collected for one key.
local function settle(key)
  local values, sums, members = FIELDS_TO_SET[key], SUMS[key], MEMBERS[key]
  if values then
    local arguments = {}
    for field, value in pairs(values) do
      arguments[#arguments + 1], arguments[#arguments + 2] = field, value
    end
    call_all('HSET', key, arguments)
    FIELDS_TO_SET[key] = nil
  end
  if sums then
    for field, number in pairs(sums) do
      if number ~= 0 then call('HINCRBY', key, field, int(number)) end
    end
    SUMS[key] = nil
  end
  if members then
    local enter, leave = {}, {}
    for id, score in pairs(members) do
      if score then enter[#enter + 1], enter[#enter + 2] = score, id
      else leave[#leave + 1] = id end
    end
    call_all('ZREM', key, leave)
    call_all('ZADD', key, enter)
    MEMBERS[key] = nil
  end
end

local function settle_all()
  for _, pending in ipairs({FIELDS_TO_SET, SUMS, MEMBERS}) do
    for key in pairs(pending) do settle(key) end
  end
  for at = 1, #GONE, 1000 do call('DEL', unpack(GONE, at, math.min(at + 999, #GONE))) end
end

-- Reads a total or an index as this script has left it.
local function look(command, key, ...)
  settle(key)
  return call(command, key, ...)
end

-- The numbers of tasks in these states, each "<all, train or serve>:<state>".
local function count(...)
  local found = look('HMGET', COUNTS, ...)
  for i, number in ipairs(found) do found[i] = tonumber(number or 0) end
  return unpack(found)
end

-- Refuses every incarnation but the newest.
local function fence(incarnation)
  local current = tonumber(call('HGET', META, 'incarnation') or 0)
  if tonumber(incarnation) ~= current then
    fail('StaleIncarnation', 'trainer incarnation ' .. incarnation .. ': the current one is ' ..
      int(current) .. '; a newer trainer has registered, so this one must stop')
  end
end

-- Tells waiting calls that `kind` may have become possible. The one who waits sets the flag in
-- the same script that found nothing, so nothing is published while no one waits.
local FLAGS = nil
local function wake(kind)
  if not FLAGS then
    local values = call('HMGET', META, 'waiting:lease', 'waiting:take', 'waiting:ended')
    FLAGS = {lease = values[1] == '1', take = values[2] == '1', ended = values[3] == '1'}
  end
  if FLAGS[kind] then
    FLAGS[kind] = false
    set(META, 'waiting:' .. kind, '0')
    call('PUBLISH', P .. 'wake', kind)
  end
end

local function wait_for(kind) set(META, 'waiting:' .. kind, '1') end

local FIELDS = {'state', 'purpose', 'seq', 'token', 'done_token', 'floor', 'want', 'deadline',
  'head', 'lengths', 'reason', 'cause', 'trainer', 'since', 'size', 'journal', 'payload', 'sessions'}
local NUMBERS = {sessions = true, seq = true, token = true, done_token = true, floor = true, deadline = true,
  head = true, since = true, size = true, journal = true, payload = true}

-- The record's small fields, or nil. Absent numbers are 0, absent strings ''.
local function read_task(id)
  local key = P .. 'task:' .. id
  local values = call('HMGET', key, unpack(FIELDS))
  if not values[1] then return nil end
  local task = {id = id, key = key}
  for i, field in ipairs(FIELDS) do
    if NUMBERS[field] then task[field] = tonumber(values[i] or 0)
    else task[field] = values[i] or '' end
  end
  return task
end

local function task_or_fail(id)
  return read_task(id) or fail('NotFound', 'task ' .. id .. ': unknown')
end

-- The trainer waits for its evaluations: they are ahead of what clients submitted, below 0.
local EVALUATION = -1099511627776

local function enter_queue(task)
  local which, seq = task.purpose, task.seq
  if which == 'serve' and task.trainer == '1' then seq = seq + EVALUATION end
  if task.want ~= '' and task.want == (look('HGET', META, 'want') or '') then which = 'wanted' end
  put('queue:' .. which, task.id, int(seq))
  if task.deadline > 0 then put('deadlines', task.id, int(task.deadline)) end
end

-- A task with sessions is run by outside agents, once; `sessions`: its attempts. When they fell silent, its
-- record has `silent`: the attempts that had not ended by then. From then on it is the task of workers, one of
-- which makes a group of the attempts that had.
local function calls_key(task, attempt) return P .. 'calls:' .. task.id .. '/' .. int(attempt) end

local function drop_calls(task)
  for attempt = 0, (task.sessions or 0) - 1 do delete(calls_key(task, attempt)) end
end

local function drop_journal(task)
  drop_calls(task)
  if task.journal == 0 then return end
  call('HDEL', task.key, 'partial', 'journal')
  hold(task.purpose, -task.journal)
  task.journal = 0
end

-- Releases a group that was kept although no step trains on it.
local function drop_spare(name)
  remove('spares', name)
  local bytes = call('STRLEN', P .. 'spare:' .. name)
  if bytes == 0 then return end
  call('DEL', P .. 'spare:' .. name)
  hold('train', -bytes)
  add(META, 'bytes:spare', -bytes)
end

-- Notes for the trainer, which keeps it with its rollouts, that a train task lost its group (`payload`: its
-- key) or ended without being trained on. The step whose batch is taken next is the one it belongs to.
local function note_discarded(task, outcome, payload)
  if CONFIG.spare_bytes == 0 then return end
  local name, reason = task.id .. '/' .. int(task.token), call('HGET', task.key, 'reason') or ''
  call('RPUSH', P .. 'discarded', name .. '\n' .. outcome .. '\n' .. reason)
  local bytes = payload and call('STRLEN', payload) or 0
  if bytes == 0 or tonumber(look('HGET', META, 'bytes:spare') or 0) + bytes > CONFIG.spare_bytes then return end
  call('RENAME', payload, P .. 'spare:' .. name)
  hold('train', bytes)
  add(META, 'bytes:spare', bytes)
  put('spares', name, int(NOW))
end

-- Writes a record again: a hash that has had a long value stays a table, which takes 300 bytes more.
local function compact(key)
  local left = call('HGETALL', key)
  call('DEL', key)
  if #left > 0 then call('HSET', key, unpack(left)) end
end

-- A record without its body. That of a session has the keys of its agents, who ask how it ended.
local function record_bytes(task)
  if (task.sessions or 0) == 0 then return RECORD end
  return RECORD + call('HSTRLEN', task.key, 'keys') + call('HSTRLEN', task.key, 'salt')
end

-- Leaves the small record.
local function drop_body(task)
  drop_calls(task)
  local left = record_bytes(task)
  call('HDEL', task.key, 'body', 'partial', 'journal', 'failed_servers', 'traceback')
  call('HSET', task.key, 'size', int(left))
  hold(task.purpose, left - task.size - task.journal)
  task.size, task.journal = left, 0
  compact(task.key)
end

-- Drops what only living tasks need. Ended train tasks keep a small record, so that their id
-- stays taken; serve tasks go altogether when their time has come.
local function enter_end(task, to)
  if task.deadline > 0 then remove('deadlines', task.id) end
  if to == 'dead_lettered' then
    put('dead', task.id, int(NOW))
    drop_journal(task)
  else
    if task.purpose == 'serve' then put('results', task.id, int(NOW)) end
    if to ~= 'trained' and to ~= 'delivered' then drop_body(task) end
  end
  if to ~= 'trained' and to ~= 'delivered' then delete(P .. 'group:' .. task.id) end
end

-- The only place where a task changes state: checks the transition, keeps the counters adding up
-- to the number submitted, keeps the indexes, wakes who waits. `score` for running: lease expiry.
-- `changes`: other fields of the record and their values, written with the state.
local function move(task, to, changes, score)
  local from = task.state
  if from ~= 'new' and not ALLOWED[from .. '>' .. to] then
    fail('LeaseLost', 'task ' .. task.id .. ' is ' .. from .. ': cannot become ' .. to)
  end
  -- The record first: should Redis refuse this write, the totals and indexes stay as they were.
  local record = changes or {}
  record[#record + 1], record[#record + 2] = 'state', to
  if not LIVE[to] then record[#record + 1], record[#record + 2] = 'ended', int(NOW) end
  -- Where a task waits for others, it is known since when.
  if to == 'queued' or to == 'completed' then
    record[#record + 1], record[#record + 2] = 'since', int(NOW)
  end
  -- Its group goes.
  if from == 'completed' and to ~= 'batched' then
    record[#record + 1], record[#record + 2] = 'payload', 0
  end
  call('HSET', task.key, unpack(record))
  if from == 'completed' and to ~= 'batched' then
    hold(task.purpose, -task.payload)
    task.payload = 0
  end
  if task.purpose == 'train' then
    local stale = from == 'completed' and to == 'queued'
    if stale or from == 'completed' and to == 'cancelled' or to == 'rejected' or to == 'expired' or
      to == 'dead_lettered' then
      local payload = from == 'completed' and P .. 'group:' .. task.id or task.refused
      note_discarded(task, stale and 'too_stale' or to, payload)
    end
  end
  task.state = to

  if from == 'new' then
    add(META, 'submitted', 1)
  else
    add(COUNTS, 'all:' .. from, -1)
    add(COUNTS, task.purpose .. ':' .. from, -1)
  end
  add(COUNTS, 'all:' .. to, 1)
  add(COUNTS, task.purpose .. ':' .. to, 1)
  if task.purpose == 'serve' and task.trainer ~= '1' and (from == 'running' or to == 'running') then
    add(COUNTS, 'clients:running', from == 'running' and -1 or 1)
  end

  if from == 'queued' then
    remove('queue:' .. task.purpose, task.id)
    remove('queue:wanted', task.id)
  elseif from == 'running' then
    remove('running:' .. task.purpose, task.id)
    remove('floors', task.id)
  elseif from == 'completed' then
    remove('completed', task.id)
    if to == 'queued' then delete(P .. 'group:' .. task.id) end
  elseif from == 'dead_lettered' or from == 'delivered' then
    remove(from == 'delivered' and 'results' or 'dead', task.id)
    call('HDEL', task.key, 'ended')
  end

  if to == 'queued' then
    enter_queue(task)
  elseif to == 'running' then
    put('running:' .. task.purpose, task.id, int(score))
    if task.purpose == 'train' then put('floors', task.id, int(task.floor)) end
  elseif to == 'completed' then
    put('completed', task.id, int(task.head * HEAD_UNIT + task.seq))
    if task.deadline > 0 then remove('deadlines', task.id) end
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

-- The trainer's own tasks: train tasks, and its evaluations.
local function of_run(task) return task.purpose == 'train' or task.trainer == '1' end

-- How the run's last tasks ended: "o" well, "x" by an error of the recipe. Too many of those stop the
-- run: no train task is leased and no batch taken until a trainer registers again.
local WINDOW = 64
local RUN = nil
local function note_end(task, error, detail)
  if CONFIG.max_failure_ratio >= 1 or not of_run(task) then return end
  if not RUN then
    local known = look('HMGET', META, 'endings', 'only_error', 'stopped', 'batch_size')
    RUN = {endings = known[1] or '', only = known[2] or '', stopped = known[3] or '',
      first = math.min(math.max(tonumber(known[4] or CONFIG.batch_size), 16), WINDOW)}
  end
  RUN.only = (RUN.endings == '' or RUN.only == error) and error or ''
  RUN.endings = string.sub(RUN.endings .. (error and 'x' or 'o'), -WINDOW)
  set(META, 'endings', RUN.endings)
  set(META, 'only_error', RUN.only)
  if not error or RUN.stopped ~= '' then return end
  local ended, _, failed = #RUN.endings, string.gsub(RUN.endings, 'x', 'x')
  if RUN.only ~= '' and ended >= RUN.first then
    RUN.stopped = 'the first ' .. ended .. ' tasks all failed with the same error'
  elseif ended == WINDOW and failed > CONFIG.max_failure_ratio * WINDOW then
    RUN.stopped = failed .. ' of the last ' .. WINDOW .. ' tasks failed because of the recipe; the newest of these'
  else
    return
  end
  RUN.stopped = RUN.stopped .. ': task ' .. task.id .. ': ' .. detail
  set(META, 'stopped', RUN.stopped)
end

-- Counts an attempt that the recipe failed under its kind of error; at most 32 kinds.
local function note_failure(task, site, detail)
  local key = P .. 'failures'
  if call('HEXISTS', key, site) == 0 then
    if call('HLEN', key) >= 32 then site = 'other errors' end
    call('HSETNX', key, site, task.id .. '\n' .. int(NOW) .. '\n' .. detail)
  end
  add(key .. ':attempts', site, 1)
end

local ATTEMPTS = {
  workflow_error = {field = 'attempts', limit = CONFIG.max_attempts},
  infrastructure = {field = 'infra', limit = CONFIG.max_infrastructure_attempts},
  too_stale = {field = 'regen', limit = CONFIG.max_regenerations + 1},
}

-- No one could run a session again. But what its ended attempts did is there: it is queued for a worker that
-- makes their group, and again where that worker fails. Without such attempts, too stale, refused, or after too
-- many failures it expires.
local function end_session(task, cause, detail)
  local silent = {}
  for attempt = 0, task.sessions - 1 do
    if call('HEXISTS', calls_key(task, attempt), 'ended') == 0 then silent[#silent + 1] = int(attempt) end
  end
  local again = #silent < task.sessions and (cause == '' or cause == 'infrastructure' and
    call('HINCRBY', task.key, 'infra', 1) < CONFIG.max_infrastructure_attempts)
  if not again then return move(task, 'expired', {'cause', cause, 'reason', detail}) end
  -- A call that is under way must not renew it: for its agents it is over.
  local changes = {'revoked', '1'}
  if call('HSETNX', task.key, 'silent', table.concat(silent, ',')) == 1 then
    changes[3], changes[4] = 'reason', detail .. '; ' .. int(task.sessions - #silent) .. ' of ' ..
      int(task.sessions) .. ' attempts had ended'
  end
  move(task, 'queued', changes)
end

-- How long a lease lasts: that of a session as long as its agents may be silent.
local function lease_ttl(idle, silent) return tonumber(idle and not silent and idle or CONFIG.lease_ttl_ms) end

-- Ends an attempt: back to the front of the queue, or to the dead letters once the limit of that
-- cause is reached. An empty cause counts against nothing. `site`: what workflow errors that are
-- alike share.
local function end_attempt(task, cause, detail, traceback, site)
  if task.sessions > 0 then return end_session(task, cause, detail) end
  if cause ~= '' then
    local limit = ATTEMPTS[cause]
    if cause == 'workflow_error' then
      site = site ~= '' and site or detail
      note_failure(task, site, detail)
    end
    local attempts = call('HINCRBY', task.key, limit.field, 1)
    if cause == 'too_stale' then add(META, 'regenerated', 1) end
    if attempts >= limit.limit then
      traceback = traceback or ''
      task.size = task.size + #traceback
      move(task, 'dead_lettered', {'cause', cause, 'traceback', traceback, 'size', int(task.size),
        'reason', cause .. ' after ' .. int(attempts) .. ' attempts: ' .. detail})
      hold(task.purpose, #traceback)
      if cause == 'workflow_error' then note_end(task, site, detail) end
      return
    end
  end
  move(task, 'queued', {'reason', detail})
end

-- The ledger's own record. Absent numbers are 0, or what the experiment file says.
local META_FIELDS = {'incarnation', 'policy_version', 'last_taken', 'last_committed', 'let_go',
  'last_size', 'size_before', 'batch_size', 'max_head_offpolicyness', 'max_concurrent_rollouts', 'take_step',
  'take_since', 'staleness_max', 'sealed', 'refill_below', 'seq', 'token', 'submitted', 'kept_train', 'kept_serve'}
local function read_meta()
  local values, meta = look('HMGET', META, 'want', 'stopped', unpack(META_FIELDS)), {}
  for i, field in ipairs(META_FIELDS) do
    meta[field] = tonumber(values[i + 2] or CONFIG[field] or 0)
  end
  meta.want, meta.stopped = values[1] or '', values[2] or ''
  return meta
end

-- An agent outside that was refused a slot asks again in a second (open.lua); queued tasks take a free
-- slot at once, so it would never get one. META's `kept_train` and `kept_serve`: until when (ms) a slot
-- is kept for the next session; -1: a session had the last one, so a queued task is next; 0: neither.
local function kept_place(meta, purpose)
  local left = meta['kept_' .. purpose] - NOW
  return left > 0 and left <= CONFIG.kept_place_ms and 1 or 0  -- else the clock was set back
end

-- Tells the trainer that its run has been stopped.
local function refuse_if_stopped(meta)
  if meta.stopped ~= '' then fail('WorkflowError', (string.gsub(meta.stopped, '%s+', ' '))) end
end

-- Puts a dead letter back, with fresh attempts.
local function revive(task)
  local trace = call('HSTRLEN', task.key, 'traceback')
  call('HDEL', task.key, 'attempts', 'infra', 'regen', 'failed_servers', 'cause', 'traceback',
    'reason', 'deadline', 'revoked')
  task.deadline, task.size = 0, task.size - trace
  move(task, 'queued', {'size', int(task.size)})
  hold(task.purpose, -trace)
end

-- Serve tasks that may still start, and those of clients among them. Once there has been a trainer they
-- leave it half of the slots, or as many as its groups ahead can fill, and clients leave its evaluations a
-- quarter of the rest: however long they hold theirs, training does not wait for them.
local function serve_room(meta)
  local most, clients = meta.max_concurrent_rollouts, meta.max_concurrent_rollouts
  if meta.incarnation > 0 then
    most = most - math.min(math.floor(most / 2), (meta.max_head_offpolicyness + 1) * meta.batch_size)
    clients = math.max(1, most - math.ceil(most / 4))
  end
  local running, of_clients = count('serve:running', 'clients:running')
  return most - running, math.min(most - running, clients - of_clients)
end

-- Groups that may still start.
local function admission(meta)
  if meta.stopped ~= '' then return 0, 'admission: the run was stopped: ' .. meta.stopped end
  -- Only the two newest batches can be ahead: one is trained on, and the version of the other may be on
  -- its way to the servers. They count until the version moves, even if committed and released by
  -- then: what starts now starts from the weights before them.
  local ahead = meta.last_taken > meta.policy_version and meta.last_size or 0
  if meta.last_taken - 1 > meta.policy_version then ahead = ahead + meta.size_before end
  local running, completed = count('train:running', 'train:completed')
  local eta, size = meta.max_head_offpolicyness, meta.batch_size
  return (eta + 1) * size - running - completed - ahead,
    'admission: ' .. int(running) .. ' running + ' .. int(completed) .. ' completed + ' ..
    int(ahead) .. ' batched ahead of version ' .. int(meta.policy_version) ..
    ', at most (' .. int(eta) .. ' + 1) * ' .. int(size)
end

-- A server serves a version: what is leased from now on starts from it, and admission counts from it.
local function confirm(meta, version)
  if version <= meta.policy_version then return end
  meta.policy_version = version
  set(META, 'policy_version', int(version))
  wake('lease')
end

-- The first call of a worker's newer life ends all leases of the lives before: no one works on them.
-- Each holds few leases, so one script can; an older life that still speaks is refused.
local function begin_life(worker, boot)
  local key = P .. 'life:' .. worker
  local known = tonumber(call('GET', key) or 0)
  -- Pods get new names forever, so what is known of one goes a day after it was last heard of.
  if boot > known or call('TTL', key) < 43200 then
    call('SET', key, int(math.max(boot, known)), 'EX', 86400)
  end
  if boot == known then return end
  if boot < known then
    fail('LeaseLost', 'worker ' .. worker .. ': a newer process of this name has begun; this one must stop')
  end
  if known == 0 then return end
  for _, purpose in ipairs({'train', 'serve'}) do
    for _, id in ipairs(look('ZRANGE', P .. 'running:' .. purpose, 0, -1)) do
      if call('HGET', P .. 'task:' .. id, 'worker') == worker then
        call('HSET', P .. 'task:' .. id, 'revoked', '1')  -- a renewal under way must not take it up
        end_attempt(read_task(id), 'infrastructure', 'worker ' .. worker .. ' died and was started again')
      end
    end
  end
end

-- The lease's token must be the newest given for the task, and the task still be open.
local function check_lease(task, token)
  -- A lease that has completed is spent, also where its group was discarded and the task queued again.
  local newest, spent = tonumber(token) == task.token, tonumber(token) == task.done_token
  if not newest or spent or (task.state ~= 'running' and task.state ~= 'queued') then
    fail('LeaseLost', 'task ' .. task.id .. ': lease ' .. token .. ' no longer holds; the task is ' ..
      task.state .. (spent and ', and this lease has completed' or
      task.token > 0 and ', its newest lease is ' .. int(task.token) or ''))
  end
end

-- Forgets the list that rollout_batch waits for: its tasks queue like any other.
local function dissolve_wanted()
  local found = look('ZRANGE', P .. 'queue:wanted', 0, -1, 'WITHSCORES')
  for i = 1, #found, 2 do
    put('queue:train', found[i], found[i + 1])
    remove('queue:wanted', found[i])
  end
  set(META, 'want', '')
end

-- What a script was refused with by `fail`, from what pcall caught: that itself, or its text with
-- the place in front, for servers differ. Nil: a fault.
local function refusal(caught)
  return string.match(type(caught) == 'table' and caught.err or tostring(caught), 'AREAL .*')
end

-- What a function returns, or the error it was refused with: of many, each is refused by itself.
local function result_or_refusal(of, ...)
  local ok, result = pcall(of, ...)
  if ok then return result end
  local refused = refusal(result)
  if not refused then error(result) end
  return {err = refused}
end
