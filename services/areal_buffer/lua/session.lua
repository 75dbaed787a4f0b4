-- ARGV: id, token, attempt, then what its agent did:
--   begin, call id, answers, prompt, memory limit, bytes that the calls of a task may have,
--     number of the answer that it extends ('': none)
--   record, number, answer, call id
--   reward, number ('': of the attempt), value
--   delivered, call id, numbers of answers…
--   end
-- Returns {number of the first answer, attempts that have not ended}.
local task, token, attempt, what = task_or_fail(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
if task.sessions <= attempt then fail('NotFound', 'session ' .. task.id .. '-' .. int(attempt) .. ': unknown') end
local key = calls_key(task, attempt)
if what == 'end' and task.done_token == token and token > 0 then return {0, 0} end
local ended = call('HEXISTS', key, 'ended') == 1
local over = call('HEXISTS', task.key, 'silent') == 1
if task.state ~= 'running' or task.token ~= token or over and not (ended and what == 'end') then
  fail('LeaseLost', 'session ' .. task.id .. ' is ' .. task.state .. (task.reason ~= '' and ': ' .. task.reason or ''))
end
if ended and what ~= 'end' then fail('LeaseLost', 'session ' .. task.id .. '-' .. int(attempt) .. ' has ended') end
if not over then put('running:' .. task.purpose, task.id, int(NOW + tonumber(call('HGET', task.key, 'idle')))) end

-- What Redis needs for a field beside its value: names and their entries, which are most of it when one
-- prompt asks for many answers.
local FIELD = 40
local added = 0
local function write(field, value)
  if call('HSETNX', key, field, value) == 1 then added = added + FIELD + #value end
end
local number = 0
if what == 'begin' then
  local begun = 'begun:' .. ARGV[5]
  number = tonumber(call('HGET', key, begun) or -1)
  if number < 0 then
    -- Redis may have lost its latest writes, which the worker still had.
    if ARGV[10] ~= '' and call('HEXISTS', key, ARGV[10] .. ':answer') == 0 then
      fail('NotFound', 'answer ' .. ARGV[10] .. ' of session ' .. task.id .. ': not in the ledger')
    end
    local bytes = #ARGV[7] + (1 + tonumber(ARGV[6])) * FIELD
    if task.journal + bytes > tonumber(ARGV[9]) then
      fail('InvalidInput', 'session ' .. task.id .. ': its calls have ' .. int(task.journal + bytes) ..
        ' bytes: at most ' .. ARGV[9])
    end
    if not make_room(tonumber(ARGV[8]) - bytes) then
      fail('CapacityExceeded', 'the ledger is near its memory limit' .. again())
    end
    number = call('HINCRBY', key, 'calls', tonumber(ARGV[6])) - tonumber(ARGV[6])
    write(begun, int(number))
    write(int(number) .. ':prompt', ARGV[7])
    for more = number + 1, number + tonumber(ARGV[6]) - 1 do write(int(more) .. ':same', int(number)) end
  end
elseif what == 'end' then
  write('ended', '1')
elseif what == 'delivered' then
  for each = 6, #ARGV do
    local first = call('HGET', key, ARGV[each] .. ':same') or ARGV[each]
    if call('HGET', key, 'begun:' .. ARGV[5]) ~= first then
      fail('NotFound', 'prompt of answer ' .. ARGV[each] .. ' of session ' .. task.id .. ': not in the ledger')
    end
    write(ARGV[each] .. ':delivered', '1')
  end
else
  local calls = tonumber(call('HGET', key, 'calls') or 0)
  if ARGV[5] ~= '' and tonumber(ARGV[5]) >= calls then
    fail('NotFound', 'answer ' .. ARGV[5] .. ': the session has ' .. int(calls))
  end
  if what == 'record' then
    -- Where it lost a prompt, too, another one may have got its number.
    local first = call('HGET', key, ARGV[5] .. ':same') or ARGV[5]
    if call('HGET', key, 'begun:' .. ARGV[7]) ~= first then
      fail('NotFound', 'prompt of answer ' .. ARGV[5] .. ' of session ' .. task.id .. ': not in the ledger')
    end
    write(ARGV[5] .. ':answer', ARGV[6])
  else
    local field = ARGV[5] == '' and 'outcome' or ARGV[5] .. ':reward'
    added = added + #ARGV[6] - call('HSTRLEN', key, field)
    if call('HSET', key, field, ARGV[6]) == 1 then added = added + FIELD end
  end
end
if added ~= 0 then
  call('HSET', task.key, 'journal', int(task.journal + added))
  hold(task.purpose, added)
end
local open = task.sessions
for each = 0, task.sessions - 1 do open = open - call('HEXISTS', calls_key(task, each), 'ended') end
return {number, open}
