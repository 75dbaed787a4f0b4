-- ARGV: worker id, max tasks, boot of the worker (0: its id is of this life only)
-- Returns {reason, leases}; a lease: {id, body, token, policy version, partial, failed servers,
-- queued since, attempts of a session (0: it is none)}.
local worker, most, boot = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if boot > 0 then begin_life(worker, boot) end
set(META, 'heard', int(NOW))
local meta = read_meta()
local slots = meta.max_concurrent_rollouts - count('all:running')
local headroom, why = admission(meta)
local bytes = 0
-- Places that the next sessions of outside agents get: of the bound, and of all that may run.
local kept_train, kept_serve = kept_place(meta, 'train'), kept_place(meta, 'serve')
local kept = kept_train + kept_serve
headroom = headroom - kept_train

-- The queues, in order and as far as this call can reach; `at`: where each has got to.
local function queue(which, room)
  room = math.min(room, most, slots)
  return room > 0 and look('ZRANGE', P .. 'queue:' .. which, 0, room - 1) or {}
end
local serve_slots, clients_slots = serve_room(meta)
clients_slots = clients_slots - kept_serve
local queues = {wanted = queue('wanted', meta.stopped == '' and most or 0), serve = queue('serve', serve_slots),
  train = queue('train', math.max(headroom, 1))}
local at = {wanted = 1, serve = 1, train = 1}
local function first(which) return queues[which][at[which]] end
local function first_serve()
  local id = first('serve')
  if id and clients_slots <= 0 and call('HGET', P .. 'task:' .. id, 'trainer') ~= '1' then return nil end
  return id
end

-- The body of a task of the run names the recipe that its trainer had; a later one may have brought a
-- changed recipe. One digest is as long as another.
local recipes = call('HGET', META, 'recipes') or ''
local newest = string.match(recipes, '%x+$')
local function under_newest_recipe(task, body)
  if newest and of_run(task) then
    for digest in string.gmatch(recipes, '%x+') do
      if digest ~= newest and #digest == #newest then body = string.gsub(body, digest, newest) end
    end
  end
  return body
end

local function lease(id)
  local task = read_task(id)
  local stored = call('HMGET', task.key, 'body', 'partial', 'failed_servers')
  local partial = stored[2] or ''
  -- Work of an earlier attempt is worth continuing only while its tokens are fresh enough for the
  -- next batch: that after the last one taken, for which the version may not have moved yet.
  if partial ~= '' and task.purpose == 'train' and
    math.max(meta.policy_version, meta.last_taken) - task.floor > meta.max_head_offpolicyness then
    partial = ''
    drop_journal(task)
  end
  -- The tokens of a session are there, and as old as they are.
  if partial == '' and task.sessions == 0 then task.floor = meta.policy_version end
  bytes = bytes + #(stored[1] or '') + #partial
  meta.token = meta.token + 1
  add(META, 'token', 1)
  move(task, 'running', {'token', int(meta.token), 'worker', worker, 'floor', int(task.floor)},
    NOW + CONFIG.lease_ttl_ms)
  call('HDEL', task.key, 'revoked')
  return {id, under_newest_recipe(task, stored[1] or ''), meta.token, meta.policy_version, partial,
    stored[3] or '', task.since, task.sessions}
end

local leases = {}
local serve_turn = call('HGET', META, 'turn') ~= 'serve'
local blocked = false
-- An answer that no message can carry would lose its leases: the rest comes with the next call.
while #leases < most and slots > 0 and bytes < 32 * 1024 * 1024 do
  -- What rollout_batch waits for goes first and past the admission bound, for without exactly
  -- these the trainer cannot continue, however many other groups fill the bound.
  local train = first('wanted') and 'wanted' or first('train') and 'train'
  if train == 'train' and (headroom <= 0 or slots <= kept) then train, blocked = nil, true end
  local from
  if (serve_turn or not train) and slots > kept and first_serve() then
    from, serve_turn, serve_slots, clients_slots = 'serve', false, serve_slots - 1, clients_slots - 1
  elseif train then from, serve_turn, headroom = train, true, headroom - 1 end
  if not from then break end
  slots = slots - 1
  if from ~= 'wanted' and meta['kept_' .. from] < 0 then set(META, 'kept_' .. from, 0) end
  leases[#leases + 1] = lease(first(from))
  at[from] = at[from] + 1
end

if #leases == 0 then
  wait_for('lease')
  if slots <= 0 then
    why = 'admission: max_concurrent_rollouts reached: ' .. int(meta.max_concurrent_rollouts) .. ' running'
  elseif kept > 0 and count('all:queued') > 0 then
    why = why .. '; slots reserved for agents whose session was refused: ' .. int(kept)
  elseif clients_slots <= 0 and not blocked and count('serve:queued') > 0 then
    why = 'admission: of max_concurrent_rollouts ' .. int(meta.max_concurrent_rollouts) .. ', ' ..
      int(count('serve:running')) .. ' run serve tasks; the rest is for training'
  elseif not blocked then
    why = 'queue empty'
  end
  return {why, {}}
end
set(META, 'turn', serve_turn and 'train' or 'serve')
if meta.refill_below > 0 and count('train:queued') < meta.refill_below then wake('take') end
return {'', leases}
