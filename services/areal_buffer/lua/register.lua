-- ARGV: resume step, batch size, eta, max concurrent rollouts, digest of the recipe ('': unknown)
-- Returns {incarnation, last taken step, last committed step, dead letters queued again}.
local step = tonumber(ARGV[1])
local meta = read_meta()
if step < meta.let_go then
  fail('WrongStep', 'resume_step ' .. int(step) .. ': the batches after it were released; ' ..
    'the oldest resumable step is ' .. int(meta.let_go))
end
if step > meta.last_taken then
  if meta.submitted > 0 or meta.incarnation > 0 then
    fail('WrongStep', 'resume_step ' .. int(step) .. ': the ledger has handed out batches only up to ' ..
      'step ' .. int(meta.last_taken))
  end
  -- An empty ledger, e.g. a new Redis: continue from the checkpoint, with nothing to replay. The lost
  -- one's incarnations are in the names of checkpoints and weights: those of this one are higher.
  meta.incarnation = math.floor(NOW / 1000)
  for _, field in ipairs({'policy_version', 'last_taken', 'last_committed', 'let_go'}) do
    set(META, field, int(step))
    meta[field] = step
  end
end
set(META, 'incarnation', int(meta.incarnation + 1))
set(META, 'batch_size', ARGV[2])
set(META, 'max_head_offpolicyness', ARGV[3])
set(META, 'max_concurrent_rollouts', ARGV[4])
dissolve_wanted()

-- A run that was stopped for its recipe's errors is tried again, and so is what a recipe that has
-- been changed since had failed.
local recipes = call('HGET', META, 'recipes') or ''
local newest = string.match(recipes, '%x+$') or ''
local changed = ARGV[5] ~= '' and newest ~= '' and newest ~= ARGV[5]
if ARGV[5] ~= '' and newest ~= ARGV[5] then
  -- Those whose tasks run under the newest from now on (lease.lua): the last ones.
  set(META, 'recipes', string.sub(string.gsub(recipes, ARGV[5], '') .. ' ' .. ARGV[5], -2080))
end
local retried = 0
if changed or meta.stopped ~= '' then
  for _, id in ipairs(look('ZREVRANGE', P .. 'dead', 0, 9999)) do
    local task = read_task(id)
    if task.cause == 'workflow_error' and of_run(task) then
      revive(task)
      retried = retried + 1
    end
  end
end
set(META, 'retried', retried)
for _, field in ipairs({'stopped', 'endings', 'only_error'}) do call('HDEL', META, field) end
delete(P .. 'failures')
delete(P .. 'failures:attempts')
wake('lease')
wake('take')
return {meta.incarnation + 1, meta.last_taken, meta.last_committed, retried}
