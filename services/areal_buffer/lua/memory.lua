-- Part of the scripts that store or free much: is there room, and what goes to make some.
--
-- Over its limit the ledger lets groups go that no step trains on, then results: those that have been read, but for a moment, for who read
-- one may not have got the answer; then whole tasks that have ended, the oldest first, but for the time
-- that one who waits for them takes to read them; then dead letters of clients.
local READ_MS, UNREAD_MS = 10000, 60000
local MOST = 500   -- of each in one script

-- Bytes of all tasks, as this script has left them.
local BEFORE
local function held()
  if not BEFORE then
    local found = look('HMGET', META, 'bytes:train', 'bytes:serve')
    BEFORE = tonumber(found[1] or 0) + tonumber(found[2] or 0) - HELD
  end
  return BEFORE + HELD
end

-- Drops group and body of a delivered task; its record stays.
local function release_result(id)
  remove('read', id)
  local task = read_task(id)
  if not task or task.state ~= 'delivered' then return end
  drop_body(task)
  call('HSET', task.key, 'payload', 0)
  call('DEL', P .. 'group:' .. id)
  hold(task.purpose, -task.payload)
end

-- Drops an ended serve task altogether: its id is free.
local function release_task(id)
  remove('results', id)
  remove('read', id)
  local task = read_task(id)
  if not task then return end
  call('DEL', task.key, P .. 'group:' .. id)
  hold(task.purpose, -task.size - task.journal - task.payload)
end

-- Drops a dead letter of a client. Those of the run stay until a person drops them.
local function release_letter(id)
  local task = read_task(id)
  if not task or task.purpose ~= 'serve' or task.trainer == '1' then return end
  remove('dead', id)
  release_task(id)
end

-- Releases what is in an index since then or longer, until there is no more than `enough` (nil: all);
-- returns how many.
local function release(index, each, since, enough)
  local released = 0
  for _, id in ipairs(look('ZRANGEBYSCORE', P .. index, '-inf', int(since), 'LIMIT', 0, MOST)) do
    if enough and held() <= enough then break end
    each(id)
    released = released + 1
  end
  return released
end

-- Whether no more than `enough` is held, with what could be released for it.
local function make_room(enough)
  if held() <= enough then return true end
  release('spares', drop_spare, NOW, enough)
  release('read', release_result, NOW - READ_MS, enough)
  if held() > enough then release('results', release_task, NOW - UNREAD_MS, enough) end
  if held() > enough then release('dead', release_letter, NOW - UNREAD_MS, enough) end
  return held() <= enough
end

-- When to try again: as soon as something can be released, or when others may have made room.
local function again()
  local seconds = 5
  for index, age in pairs({read = READ_MS, results = UNREAD_MS}) do
    local first = look('ZRANGE', P .. index, 0, 0, 'WITHSCORES')
    if first[2] then seconds = math.min(seconds, (first[2] + age - NOW) / 1000) end
  end
  return '; try again in ' .. int(math.ceil(math.max(seconds, 1))) .. ' s'
end
