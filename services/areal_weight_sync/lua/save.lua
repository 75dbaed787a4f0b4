-- Writes changed servers and the totals together. KEYS: servers hash, weights hash, lease.
-- ARGV: owner, totals (JSON), then server_id, record (JSON; empty: forget) pairs.
if redis.call('GET', KEYS[3]) ~= ARGV[1] then
  return 0
end
redis.call('HSET', KEYS[2], 'totals', ARGV[2])
for i = 3, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[1], ARGV[i])
  else
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
return 1
