-- Makes a version current: only the lease holder, only a newer version, never an older incarnation.
-- KEYS: weights hash, lease, the ledger's meta hash (read only: the incarnation that registered
-- last). ARGV: owner, version, incarnation, path, manifest (JSON), stored (1; 0: broadcast, no files
-- yet).
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return {'standby', '0'}
end
local highest = tonumber(redis.call('HGET', KEYS[1], 'highest_incarnation') or '0')
local current = tonumber(redis.call('HGET', KEYS[1], 'version') or '-1')
local version = tonumber(ARGV[2])
local incarnation = tonumber(ARGV[3])
local registered = tonumber(redis.call('HGET', KEYS[3], 'incarnation') or '0')
local newest = math.max(highest, registered)
-- Version 0 is no one's: weight-sync publishes it, whatever trainers have registered.
if incarnation < newest and not (version == 0 and current < 0) then
  return {'stale', tostring(newest)}
end
-- A version that was broadcast is published again once it is stored; when its trainer died before
-- that, the next one makes it again. The next one also publishes again what arrived here while the
-- answer to its predecessor, or to the coordinator, was lost.
local unstored = redis.call('HGET', KEYS[1], 'stored') == '0'
local publisher = tonumber(redis.call('HGET', KEYS[1], 'incarnation') or '0')
if version == current and version > 0
    and ((unstored and ARGV[6] == '1') or incarnation > publisher) then
  redis.call('HSET', KEYS[1], 'incarnation', ARGV[3], 'path', ARGV[4], 'manifest', ARGV[5],
    'stored', ARGV[6], 'highest_incarnation', tostring(math.max(highest, incarnation)))
  return {'ok', ARGV[2]}
end
if version == current and redis.call('HGET', KEYS[1], 'incarnation') == ARGV[3]
    and redis.call('HGET', KEYS[1], 'path') == ARGV[4] then
  return {'ok', ARGV[2]}
end
if version <= current then
  return {'wrong', tostring(current)}
end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'incarnation', ARGV[3], 'path', ARGV[4],
  'manifest', ARGV[5], 'stored', ARGV[6], 'highest_incarnation', tostring(math.max(highest, incarnation)))
if version == 0 then
  redis.call('HSET', KEYS[1], 'base', ARGV[5])
else
  redis.call('HINCRBY', KEYS[1], 'published', 1)
end
return {'ok', ARGV[2]}
