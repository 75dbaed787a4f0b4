-- Returns {meta, counts, headroom, submission time of the oldest queued task in ms (0: none)}.
local limit = limits()
local oldest, oldest_seq = 0, nil
for _, which in ipairs({'train', 'serve', 'wanted'}) do
  local found = call('ZRANGE', P .. 'queue:' .. which, 0, 0, 'WITHSCORES')
  if found[1] and (not oldest_seq or tonumber(found[2]) < oldest_seq) then
    oldest_seq = tonumber(found[2])
    oldest = call('HGET', P .. 'task:' .. found[1], 'submitted')
  end
end
return {call('HGETALL', META), call('HGETALL', COUNTS), (admission(limit)), tonumber(oldest),
  limit.batch_size, limit.eta, limit.max_concurrent}
