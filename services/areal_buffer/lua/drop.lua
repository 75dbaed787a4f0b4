-- ARGV: ids; none: up to 500 dead letters
-- Takes dead letters off the list for good; their state and the counters stay as they are.
-- Returns how many.
local ids = #ARGV > 0 and ARGV or look('ZRANGE', P .. 'dead', 0, 499)
local dropped = 0
for _, id in ipairs(ids) do
  if call('ZREM', P .. 'dead', id) == 1 then
    local task = read_task(id)
    drop_body(task)
    call('HDEL', task.key, 'lengths', 'head')
    if task.purpose == 'serve' then put('results', id, int(NOW)) end
    dropped = dropped + 1
  end
end
return dropped
