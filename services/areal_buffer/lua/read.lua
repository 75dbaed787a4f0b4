-- ARGV: ids of tasks whose result has been read
for _, id in ipairs(ARGV) do
  if call('ZSCORE', P .. 'results', id) and tonumber(call('HGET', P .. 'task:' .. id, 'payload') or 0) > 0
  then
    call('ZADD', P .. 'read', 'NX', int(NOW), id)
  end
end
return #ARGV
