-- Part of take.lua: rollout_batch's own tasks, in its order, once all of them have ended.
local function take_named(meta, step, oldest, too_stale, batch, answer)
  local want = redis.sha1hex(int(step) .. '\n' .. table.concat(ARGV, '\n', 7))
  local fresh = meta.want ~= want
  if fresh then
    dissolve_wanted()
    set(META, 'want', want)
  end
  local ready, gone, queued, running = {}, {}, 0, 0
  for i = 7, #ARGV do
    local task = task_or_fail(ARGV[i])
    if task.purpose ~= 'train' then
      fail('InvalidInput', 'task_ids: task ' .. task.id .. ' is of purpose serve, expected train')
    end
    if fresh then
      task.want = want
      call('HSET', task.key, 'want', want)
      if task.state == 'queued' then
        remove('queue:train', task.id)
        enter_queue(task)
        wake('lease')
      end
    end
    if task.state == 'completed' and task.head < oldest then too_stale(task) end
    if task.state == 'completed' then ready[#ready + 1] = task
    elseif task.state == 'queued' then queued = queued + 1
    elseif task.state == 'running' then running = running + 1
    else gone[#gone + 1] = task end
  end
  if queued + running > 0 then
    return answer('waiting', int(queued + running) .. ' of ' .. int(#ARGV - 6) ..
      ' tasks: ' .. int(queued) .. ' queued, ' .. int(running) .. ' running', 0)
  end
  if #ready == 0 then
    dissolve_wanted()
    fail('WorkflowError', 'step ' .. int(step) .. ': none of the ' .. int(#gone) ..
      ' tasks gave a group; ' .. gone[1].id .. ' is ' .. gone[1].state .. (gone[1].reason ~= '' and ': ' .. gone[1].reason or ''))
  end
  return batch(ready)
end
