-- ARGV: worker id, max tasks, boot of the worker (0: its id is of this life only)
-- Returns {reason, leases}; a lease: {id, body, token, policy version, partial, failed servers}.
local worker, wanted, boot = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if boot > 0 then begin_life(worker, boot) end
local limit = limits()
local slots = limit.max_concurrent - count('all:running')
local headroom, why = admission(limit)
local bytes = 0
local function first(which) return call('ZRANGE', P .. 'queue:' .. which, 0, 0)[1] end

local function lease(id)
  local task = read_task(id)
  local stored = call('HMGET', task.key, 'body', 'partial', 'failed_servers')
  local partial = stored[2] or ''
  -- Work of an earlier attempt is worth continuing only while its tokens are fresh enough.
  if partial ~= '' and task.purpose == 'train' and limit.version - task.floor > limit.eta then
    partial = ''
    call('HDEL', task.key, 'partial')
  end
  if partial == '' then task.floor = limit.version end
  bytes = bytes + #(stored[1] or '') + #partial
  local token = call('HINCRBY', META, 'token', 1)
  call('HSET', task.key, 'token', token, 'worker', worker, 'floor', int(task.floor))
  call('HDEL', task.key, 'revoked')
  move(task, 'running', NOW + CONFIG.lease_ttl_ms)
  return {id, stored[1] or '', token, limit.version, partial, stored[3] or ''}
end

local leases = {}
local serve_turn = call('HGET', META, 'turn') ~= 'serve'
local blocked = false
-- An answer that no message can carry would lose its leases: the rest comes with the next call.
while #leases < wanted and slots > 0 and bytes < 32 * 1024 * 1024 do
  -- What rollout_batch waits for goes first and past the admission bound, for without exactly
  -- these the trainer cannot go on, however many other groups fill the bound.
  local train = first('wanted')
  if not train then
    train = first('train')
    if train and headroom <= 0 then train, blocked = nil, true end
  end
  local serve = first('serve')
  local id
  if serve and (serve_turn or not train) then id, serve_turn = serve, false
  elseif train then id, serve_turn, headroom = train, true, headroom - 1 end
  if not id then break end
  slots = slots - 1
  leases[#leases + 1] = lease(id)
end

if #leases == 0 then
  wait_for('lease')
  if slots <= 0 then
    why = 'admission: max_concurrent_rollouts ' .. int(limit.max_concurrent) .. ' are running'
  elseif not blocked then
    why = 'queue empty'
  end
  return {why, {}}
end
call('HSET', META, 'turn', serve_turn and 'train' or 'serve')
return {'', leases}
