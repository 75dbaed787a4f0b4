-- ARGV: incarnation, seal (1: after these), near the memory limit (1), then per task
--       id, purpose, body, epoch, index (both '' if none), time to live in ms ('' if none)
-- Returns one 0/1 per task: accepted.
if ARGV[1] ~= '0' then fence(ARGV[1]) end
local meta = read_meta()
local function refuse_if_full(purpose)
  -- Enough to do: what is queued can fill every batch that staleness lets be generated ahead.
  if purpose == 'serve' or count('train:queued') >= 
    (meta.max_head_offpolicyness + 1) * meta.batch_size then
    fail('CapacityExceeded', 'the ledger is near its memory limit and has ' ..
      int(count('all:queued')) .. ' tasks queued: submit again later')
  end
end

local accepted, train, seq = {}, false, meta.seq
for i = 4, #ARGV, 6 do
  local id, purpose, epoch = ARGV[i], ARGV[i + 1], ARGV[i + 3]
  local known = call('EXISTS', P .. 'task:' .. id) == 1
  local seen = purpose == 'train' and epoch ~= '' and P .. 'seen:' .. epoch or nil
  if not known and seen then known = call('GETBIT', seen, ARGV[i + 4]) == 1 end
  if not known then
    if ARGV[3] == '1' then refuse_if_full(purpose) end
    if seen then call('SETBIT', seen, ARGV[i + 4], 1) end
    local deadline = ARGV[i + 5] ~= '' and NOW + tonumber(ARGV[i + 5]) or 0
    seq = seq + 1
    local record = {'purpose', purpose, 'seq', int(seq), 'body', ARGV[i + 2], 'submitted', int(NOW)}
    if deadline > 0 then record[#record + 1], record[#record + 2] = 'deadline', int(deadline) end
    if ARGV[1] ~= '0' then record[#record + 1], record[#record + 2] = 'trainer', '1' end
    move({id = id, key = P .. 'task:' .. id, purpose = purpose, state = 'new', want = '',
      seq = seq, deadline = deadline}, 'queued', record)
    add(META, 'seq', 1)
    train = train or purpose == 'train'
  end
  accepted[#accepted + 1] = known and 0 or 1
end

if ARGV[2] == '1' then
  set(META, 'sealed', 1)
  wake('take')
elseif train then
  set(META, 'sealed', 0)
end
return accepted
