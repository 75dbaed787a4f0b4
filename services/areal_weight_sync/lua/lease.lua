-- One active coordinator: takes or renews the lease; answers who holds it.
-- KEYS: lease. ARGV: owner, ttl in ms.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  return holder
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
