-- ARGV: id, purpose, body, idle in ms, memory limit in bytes, digests of the keys of its attempts
-- A task that an outside agent runs: submitted and leased at once, where an episode could start.
-- Returns its policy version.
local id, purpose, keys = ARGV[1], ARGV[2], table.concat(ARGV, ',', 6)
local known = read_task(id)
if known then
  if known.sessions == 0 or call('HGET', known.key, 'keys') ~= keys then
    fail('InvalidInput', 'task_id ' .. id .. ': there is a task of this name')
  end
  return known.floor
end
local meta = read_meta()
local headroom, why = admission(meta)
local running = count('all:running')
if running >= meta.max_concurrent_rollouts then
  headroom, why = 0, 'admission: max_concurrent_rollouts ' .. int(running) .. ' are running'
elseif purpose == 'serve' then
  headroom, why = select(2, serve_room(meta)), 'admission: the other places are for training'
end
local turn = 'kept_' .. purpose
if headroom <= 0 then
  if meta[turn] >= 0 then set(META, turn, int(NOW + CONFIG.kept_place_ms)) end
  fail('CapacityExceeded', why .. '; try again in 1 s')
end
local size = RECORD + #ARGV[3]
if not make_room(0.8 * tonumber(ARGV[5]) - size) then
  fail('CapacityExceeded', 'the ledger is near its memory limit' .. again())
end
local task = {id = id, key = P .. 'task:' .. id, purpose = purpose, state = 'new', want = '', trainer = '',
  floor = meta.policy_version, deadline = 0, sessions = #ARGV - 5}
set(META, turn, '-1')
add(META, 'seq', 1)
add(META, 'token', 1)
move(task, 'running', {'purpose', purpose, 'seq', int(meta.seq + 1), 'token', int(meta.token + 1),
  'worker', 'session', 'floor', int(task.floor), 'body', ARGV[3], 'size', int(size), 'submitted', int(NOW),
  'sessions', int(task.sessions), 'keys', keys, 'idle', ARGV[4]}, NOW + tonumber(ARGV[4]))
hold(purpose, size)
return task.floor
