-- ARGV: id, purpose, body, idle in ms, memory limit in bytes, salt of the keys, digests of the keys of its
--   attempts
-- A task that an outside agent runs: submitted and leased at once, where an episode could start. The one who
-- lost the answer asks again, perhaps by another gateway with keys of its own: the first keys stay valid.
-- Returns its policy version and the salt of its keys.
local id, purpose, keys = ARGV[1], ARGV[2], table.concat(ARGV, ',', 7)
local known = read_task(id)
if known then
  if known.sessions == 0 then fail('InvalidInput', 'task_id ' .. id .. ': a task of this id exists already') end
  local first = call('HMGET', known.key, 'salt', 'idle', 'body')
  if known.sessions ~= #ARGV - 6 or known.purpose ~= purpose or first[2] ~= ARGV[4] or
    (first[3] or ARGV[3]) ~= ARGV[3] then
    fail('InvalidInput', 'session ' .. id .. ': it was opened by another request; expected the same task, n, ' ..
      'ttl_s and purpose, or another idempotency key')
  end
  return {known.floor, first[1]}
end
local meta = read_meta()
local headroom, why = admission(meta)
local running = count('all:running')
if running >= meta.max_concurrent_rollouts then
  headroom, why = 0, 'admission: max_concurrent_rollouts reached: ' .. int(running) .. ' running'
elseif purpose == 'serve' then
  headroom, why = select(2, serve_room(meta)), 'admission: the other slots are for training'
end
local turn = 'kept_' .. purpose
if headroom <= 0 then
  if meta[turn] >= 0 then set(META, turn, int(NOW + CONFIG.kept_place_ms)) end
  fail('CapacityExceeded', why .. '; try again in 1 s')
end
local size = RECORD + #ARGV[3] + #keys + #ARGV[6]
if not make_room(0.8 * tonumber(ARGV[5]) - size) then
  fail('CapacityExceeded', 'the ledger is near its memory limit' .. again())
end
local task = {id = id, key = P .. 'task:' .. id, purpose = purpose, state = 'new', want = '', trainer = '',
  floor = meta.policy_version, deadline = 0, sessions = #ARGV - 6}
set(META, turn, '-1')
add(META, 'seq', 1)
add(META, 'token', 1)
move(task, 'running', {'purpose', purpose, 'seq', int(meta.seq + 1), 'token', int(meta.token + 1),
  'worker', 'session', 'floor', int(task.floor), 'body', ARGV[3], 'size', int(size), 'submitted', int(NOW),
  'sessions', int(task.sessions), 'keys', keys, 'salt', ARGV[6],
  'idle', ARGV[4]}, NOW + math.min(tonumber(ARGV[4]), CONFIG.first_call_ms))
hold(purpose, size)
return {task.floor, ARGV[6]}
