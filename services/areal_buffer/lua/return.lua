-- ARGV: memory limit in bytes, then of each lease: id, token, cause ('': counts against nothing), detail, traceback, partial,
--       failed server, site of a workflow error
-- Returns for each the state, or the error it was refused with.
-- Every check of a lease comes before the first write, so a refused one changes nothing.
local LIMIT = tonumber(ARGV[1])

local function return_lease(at)
  local token, partial, server = ARGV[at + 1], ARGV[at + 5], ARGV[at + 6]
  local task = task_or_fail(ARGV[at])
  if task.state == 'dead_lettered' and tonumber(token) == task.token then return task.state end
  check_lease(task, token)
  -- At the limit the next attempts start afresh. The partial work of a session is its agents' calls.
  if task.sessions > 0 then partial = '' end
  if partial ~= '' and held() + #partial - task.journal > LIMIT then partial = '' end
  if partial ~= '' then
    call('HSET', task.key, 'partial', partial, 'journal', #partial)
    hold(task.purpose, #partial - task.journal)
    task.journal = #partial
  end
  -- Returned before, or expired: that attempt has been counted.
  if task.state == 'queued' then return task.state end
  if partial == '' and task.sessions == 0 then drop_journal(task) end
  if server ~= '' then
    local failed = call('HGET', task.key, 'failed_servers') or ''
    if not string.find('\n' .. failed .. '\n', '\n' .. server .. '\n', 1, true) and #failed < 4096 then
      call('HSET', task.key, 'failed_servers', failed == '' and server or failed .. '\n' .. server)
    end
  end
  -- A renewal that was under way meanwhile must not take it up again: no one works on it.
  call('HSET', task.key, 'revoked', '1')
  end_attempt(task, ARGV[at + 2], ARGV[at + 3], ARGV[at + 4], ARGV[at + 7])
  return task.state
end

local results = {}
for number = 1, (#ARGV - 1) / 8 do results[number] = result_or_refusal(return_lease, 8 * number - 6) end
return results
