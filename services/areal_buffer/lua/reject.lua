-- ARGV: id, token, reason
local task = task_or_fail(ARGV[1])
if task.state == 'rejected' and tonumber(ARGV[2]) == task.token then return 0 end
check_lease(task, ARGV[2])
move(task, 'rejected', {'reason', ARGV[3]})
note_end(task)
return 1
