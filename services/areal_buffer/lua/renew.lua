-- ARGV: worker id, then id, token of each lease
-- Returns the ids that are lost.
local lost = {}
set(META, 'heard', int(NOW))
local headroom, slots, serve_slots
for i = 2, #ARGV, 2 do
  local id, token = ARGV[i], ARGV[i + 1]
  local values = call('HMGET', P .. 'task:' .. id, 'state', 'token', 'purpose', 'revoked', 'idle', 'silent')
  local kept = values[2] == token and values[1] == 'running'
  if kept then
    put('running:' .. values[3], id, int(NOW + lease_ttl(values[5], values[6])))
  elseif values[2] == token and values[1] == 'queued' and not values[4] then
    -- Expired but not yet given away: the worker continues, if there is room again.
    if not slots then
      local meta = read_meta()
      headroom, slots = admission(meta), meta.max_concurrent_rollouts - count('all:running')
      serve_slots = select(2, serve_room(meta))
    end
    if slots > 0 and (values[3] == 'serve' and serve_slots or headroom) > 0 then
      slots = slots - 1
      if values[3] == 'train' then headroom = headroom - 1 else serve_slots = serve_slots - 1 end
      move(read_task(id), 'running', {}, NOW + CONFIG.lease_ttl_ms)
      kept = true
    end
  end
  if not kept then lost[#lost + 1] = id end
end
return lost
