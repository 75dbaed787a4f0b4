-- Takes back expired leases and ends tasks past their time to live; at most 500 of each.
-- After an outage (of Redis, or of every buffer process) it gives all leases a new lifetime instead:
-- their holders could not renew. So it does when the clock was set back (a replica on another host
-- may have taken over): else the lease of a silent worker would last until its time comes again.
-- Releases results that were read, and serve tasks that ended long ago, as many.
-- Returns {leases extended, leases expired, tasks expired, released, gap in ms}.
local last = tonumber(call('HGET', META, 'last_sweep') or 0)
set(META, 'last_sweep', int(NOW))
local gap = last > 0 and NOW - last or 0
local extended, requeued, expired = 0, 0, 0
for _, purpose in ipairs({'train', 'serve'}) do
  local running = P .. 'running:' .. purpose
  if math.abs(gap) > 2 * CONFIG.sweep_interval_ms then
    for _, id in ipairs(look('ZRANGE', running, 0, -1)) do
      local idle = call('HGET', P .. 'task:' .. id, 'idle')
      call('ZADD', running, int(NOW + (idle or CONFIG.lease_ttl_ms)), id)
      extended = extended + 1
    end
  end
  for _, id in ipairs(look('ZRANGEBYSCORE', running, '-inf', int(NOW), 'LIMIT', 0, 500)) do
    local task = read_task(id)
    local found = call('HMGET', task.key, 'worker', 'idle')
    local who = found[2] and 'session expired: its agent' or 'lease expired: worker ' .. (found[1] or '')
    end_attempt(task, 'infrastructure', who .. ' was silent for ' ..
      int((found[2] or CONFIG.lease_ttl_ms) / 1000) .. ' s')
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
