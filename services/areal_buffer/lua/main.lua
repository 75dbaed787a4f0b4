-- After every script's own lines, which are the body of `main`. What the script has collected is
-- written however it ends: a refusal does not undo the moves that were made before it.
local ok, result = pcall(main)
settle_all()
if ok then return result end
local refused = refusal(result)
if refused then return {err = refused} end
error(result)
