-- KEYS, after the prefix: where the payload of the group was put by the same transaction, if there is one.
-- ARGV: id, token, reason
if KEYS[2] then delete(KEYS[2]) end
local task = task_or_fail(ARGV[1])
if task.state == 'rejected' and tonumber(ARGV[2]) == task.token then return 0 end
check_lease(task, ARGV[2])
task.refused = KEYS[2]
move(task, 'rejected', {'reason', ARGV[3]})
note_end(task)
return 1
