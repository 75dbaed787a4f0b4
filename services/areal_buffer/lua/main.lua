-- After every script's own lines, which are the body of `main`. What the script has collected is
-- written however it ends: a refusal does not undo the moves that were made before it.
local ok, result = pcall(main)
settle_all()
if ok then return result end
local refused = refusal(result)
if refused then return {err = refused} end
-- A fault. What Redis itself refused is told by its first word; pcall may have put the place before it.
local text = type(result) == 'table' and result.err or tostring(result)
error({err = string.match(text, 'user_script:%s?%d+: (%u+ .*)') or text})
