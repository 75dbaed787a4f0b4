-- Returns {meta, counts, headroom, submission time of the oldest queued task in ms (0: none), limits,
-- the first failure of each kind, attempts of each kind}.
local meta = read_meta()
local oldest, oldest_seq = 0, nil
for _, which in ipairs({'train', 'serve', 'wanted'}) do
  local found = look('ZRANGE', P .. 'queue:' .. which, 0, 0, 'WITHSCORES')
  if found[1] and (not oldest_seq or tonumber(found[2]) < oldest_seq) then
    oldest_seq = tonumber(found[2])
    oldest = call('HGET', P .. 'task:' .. found[1], 'submitted')
  end
end
return {call('HGETALL', META), call('HGETALL', COUNTS), (admission(meta)), tonumber(oldest),
  meta.batch_size, meta.max_head_offpolicyness, meta.max_concurrent_rollouts,
  call('HGETALL', P .. 'failures'), call('HGETALL', P .. 'failures:attempts')}
