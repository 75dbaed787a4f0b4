-- Returns {meta, counts, headroom, submission time of the oldest queued task in ms (0: none), limits,
-- the first failure of each kind, attempts of each kind}.
local meta = read_meta()
local oldest, oldest_seq = 0, nil
for _, which in ipairs({'train', 'serve', 'wanted'}) do
  local found = look('ZRANGE', P .. 'queue:' .. which, 0, 0, 'WITHSCORES')
  local seq = found[1] and tonumber(found[2])
  if seq and seq < 0 then seq = seq - EVALUATION end
  if seq and (not oldest_seq or seq < oldest_seq) then
    oldest_seq = seq
    oldest = call('HGET', P .. 'task:' .. found[1], 'submitted')
  end
end
return {call('HGETALL', META), call('HGETALL', COUNTS), (admission(meta)), tonumber(oldest),
  meta.batch_size, meta.max_head_offpolicyness, meta.max_concurrent_rollouts,
  call('HGETALL', P .. 'failures'), call('HGETALL', P .. 'failures:attempts')}
