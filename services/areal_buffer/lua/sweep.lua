-- Takes back expired leases and ends tasks past their time to live; at most 500 of each.
-- After an outage (of Redis, or of every buffer process) it gives all leases a new lifetime instead:
-- their holders could not renew. So it does when the clock was set back (a replica on another host
-- may have taken over): else the lease of a silent worker would last until its time comes again.
-- While no rollout worker is heard, sessions get theirs: however often their agents ask, no one tells us.
-- Releases results that were read, and serve tasks that ended long ago, as many.
-- Returns {leases extended, leases expired, tasks expired, released, gap in ms}.
local last = tonumber(call('HGET', META, 'last_sweep') or 0)
set(META, 'last_sweep', int(NOW))
local gap = last > 0 and NOW - last or 0
local outage = math.abs(gap) > 2 * CONFIG.sweep_interval_ms
-- One that is full renews three times in a lease's lifetime, any other asks for tasks all the time.
local deaf = NOW - tonumber(call('HGET', META, 'heard') or NOW) > CONFIG.lease_ttl_ms / 2
local extended, requeued, expired = 0, 0, 0
for _, purpose in ipairs({'train', 'serve'}) do
  local running = P .. 'running:' .. purpose
  for _, id in ipairs((outage or deaf) and look('ZRANGE', running, 0, -1) or {}) do
    local found = call('HMGET', P .. 'task:' .. id, 'idle', 'silent')
    if outage or found[1] and not found[2] then
      call('ZADD', running, int(NOW + lease_ttl(found[1], found[2])), id)
      if outage then extended = extended + 1 end
    end
  end
  for _, id in ipairs(look('ZRANGEBYSCORE', running, '-inf', int(NOW), 'LIMIT', 0, 500)) do
    local task = read_task(id)
    local found = call('HMGET', task.key, 'worker', 'idle', 'silent')
    local who = found[2] and not found[3] and 'session expired: its agent' or
      'lease expired: worker ' .. (found[1] or '')
    local silent = lease_ttl(found[2], found[3])
    if found[2] and not found[3] and task.journal == 0 and silent > CONFIG.first_call_ms then
      who, silent = who .. ' made no call: it', CONFIG.first_call_ms
    end
    end_attempt(task, 'infrastructure', who .. ' was silent for ' .. int(silent / 1000) .. ' s')
    requeued = requeued + 1
  end
end
for _, id in ipairs(look('ZRANGEBYSCORE', P .. 'deadlines', '-inf', int(NOW), 'LIMIT', 0, 500)) do
  local task = read_task(id)
  move(task, 'expired', {'reason', 'time to live passed while ' .. task.state})
  expired = expired + 1
end
-- One who reads a result again, for the answer was lost or the trainer has been resumed, does so by then.
local released = release('read', release_result, NOW - 300000)
released = math.max(released, release('results', release_task, NOW - CONFIG.serve_result_ttl_ms))
return {extended, requeued, expired, released, gap}
