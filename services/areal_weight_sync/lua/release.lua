-- Gives the lease back, if it is still ours. KEYS: lease. ARGV: owner.
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
return 1
