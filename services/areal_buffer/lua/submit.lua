-- ARGV: incarnation, seal (1: after these), memory limit in bytes, then per task
--       id, purpose, body, epoch, index (both '' if none), time to live in ms ('' if none)
-- Returns one 0/1 per task: accepted.
if ARGV[1] ~= '0' then fence(ARGV[1]) end
local meta = read_meta()
local limit = tonumber(ARGV[3])
-- Clients leave room for results, and for the evaluations of the trainer, which waits for them.
local marks = {train = limit, serve = ARGV[1] ~= '0' and limit or 0.8 * limit}
local function refuse_if_full(purpose, bytes)
  if make_room(marks[purpose] - bytes) then return end
  -- Enough to do: what is queued can fill every batch that staleness lets be generated ahead.
  if purpose == 'serve' or count('train:queued') >= (meta.max_head_offpolicyness + 1) * meta.batch_size
  then
    fail('CapacityExceeded', 'the ledger is near its memory limit and has ' ..
      int(count('all:queued')) .. ' tasks queued' .. (purpose == 'serve' and again() or '; try again in 1 s'))
  end
end

local accepted, train, seq = {}, false, meta.seq
for i = 4, #ARGV, 6 do
  local id, purpose, epoch = ARGV[i], ARGV[i + 1], ARGV[i + 3]
  local size = RECORD + #ARGV[i + 2]
  -- One whose result was read and has been released: who submits it again wants another.
  local task = purpose == 'serve' and read_task(id)
  local released = task and task.state == 'delivered' and task.payload == 0 and task.size > 0
  local known = not released and (task or call('EXISTS', P .. 'task:' .. id) == 1)
  local seen = purpose == 'train' and epoch ~= '' and P .. 'seen:' .. epoch or nil
  if not known and seen then known = call('GETBIT', seen, ARGV[i + 4]) == 1 end
  if not known then
    refuse_if_full(purpose, size)
    if seen then call('SETBIT', seen, ARGV[i + 4], 1) end
    local deadline = ARGV[i + 5] ~= '' and NOW + tonumber(ARGV[i + 5]) or 0
    seq = seq + 1
    local record = {'purpose', purpose, 'seq', int(seq), 'body', ARGV[i + 2], 'submitted', int(NOW),
      'size', int(size)}
    if deadline > 0 then record[#record + 1], record[#record + 2] = 'deadline', int(deadline) end
    if ARGV[1] ~= '0' then record[#record + 1], record[#record + 2] = 'trainer', '1' end
    task = released and read_task(id) or {id = id, key = P .. 'task:' .. id, purpose = purpose,
      state = 'new', want = '', size = 0}
    if task.state ~= 'new' then
      call('HDEL', task.key, 'attempts', 'infra', 'regen', 'cause', 'reason', 'deadline', 'revoked', 'trainer',
        'sessions', 'keys', 'salt', 'idle', 'silent')
      task.sessions = 0
    end
    task.seq, task.deadline, task.trainer = seq, deadline, ARGV[1] ~= '0' and '1' or ''
    move(task, 'queued', record)
    add(META, 'seq', 1)
    hold(purpose, size - task.size)
    train = train or purpose == 'train'
  end
  accepted[#accepted + 1] = known and 0 or 1
end

if ARGV[2] == '1' then
  set(META, 'sealed', 1)
  wake('take')
elseif train then
  set(META, 'sealed', 0)
end
return accepted
