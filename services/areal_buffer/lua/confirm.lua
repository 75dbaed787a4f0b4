-- ARGV: incarnation, version
-- Returns the policy version. The trainer tells it beside a step: the next TakeBatch is far.
fence(ARGV[1])
local version = tonumber(ARGV[2])
local meta = read_meta()
if version > meta.last_taken then
  fail('WrongStep', 'ConfirmVersion ' .. int(version) .. ': the last step taken is ' ..
    int(meta.last_taken))
end
confirm(meta, version)
return meta.policy_version
