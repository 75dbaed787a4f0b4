-- ARGV: ids; none: up to 500 dead letters
-- Returns how many were queued again.
local ids = #ARGV > 0 and ARGV or look('ZRANGE', P .. 'dead', 0, 499)
local retried = 0
for _, id in ipairs(ids) do
  -- What was dropped is no longer on the list and stays where it is.
  if look('ZSCORE', P .. 'dead', id) then
    revive(read_task(id))
    retried = retried + 1
  end
end
return retried
