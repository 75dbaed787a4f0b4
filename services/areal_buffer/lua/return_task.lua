-- ARGV: id, token, cause ('': counts against nothing), detail, traceback, partial, failed server
-- Returns the state.
local task = task_or_fail(ARGV[1])
if task.state == 'dead_lettered' and tonumber(ARGV[2]) == task.token then return task.state end
check_lease(task, ARGV[2])
if ARGV[6] ~= '' then call('HSET', task.key, 'partial', ARGV[6]) end
-- Given back before, or expired: that attempt has been counted.
if task.state == 'queued' then return task.state end
if ARGV[6] == '' then call('HDEL', task.key, 'partial') end
if ARGV[7] ~= '' then
  local failed = call('HGET', task.key, 'failed_servers') or ''
  if not string.find('\n' .. failed .. '\n', '\n' .. ARGV[7] .. '\n', 1, true) and #failed < 4096 then
    call('HSET', task.key, 'failed_servers', failed == '' and ARGV[7] or failed .. '\n' .. ARGV[7])
  end
end
end_attempt(task, ARGV[3], ARGV[4], ARGV[5])
return task.state
