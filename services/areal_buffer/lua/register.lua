-- ARGV: resume step, batch size, eta, max concurrent rollouts
-- Returns {incarnation, last taken step, last committed step}.
local step = tonumber(ARGV[1])
local limit = limits()
if step < limit.let_go then
  fail('WrongStep', 'resume_step ' .. int(step) .. ': the batches after it were let go; ' ..
    'the oldest resumable step is ' .. int(limit.let_go))
end
if step > limit.last_taken then
  if meta('submitted') > 0 or meta('incarnation') > 0 then
    fail('WrongStep', 'resume_step ' .. int(step) .. ': the ledger has given out batches up to ' ..
      'step ' .. int(limit.last_taken) .. ' only')
  end
  -- An empty ledger, e.g. a new Redis: go on from the checkpoint, with nothing to replay.
  call('HSET', META, 'policy_version', ARGV[1], 'last_taken', ARGV[1], 'last_committed', ARGV[1],
    'let_go', ARGV[1])
  limit = limits()
end
local incarnation = call('HINCRBY', META, 'incarnation', 1)
call('HSET', META, 'batch_size', ARGV[2], 'max_head_offpolicyness', ARGV[3],
  'max_concurrent_rollouts', ARGV[4])
dissolve_wanted()
wake('lease')
wake('take')
return {incarnation, limit.last_taken, limit.last_committed}
