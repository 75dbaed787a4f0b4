-- ARGV: digest, file name, source
-- Keeps a recipe. Above the limit the ones used longest ago go, but not those of the run's trainers.
local MOST = CONFIG.recipes_bytes
local id, size = ARGV[1], RECORD + #ARGV[2] + #ARGV[3]
local function key_of(digest) return P .. 'recipe:' .. digest end
put('recipes', id, int(NOW))
if call('EXISTS', key_of(id)) == 1 then return 0 end
local kept = tonumber(look('HGET', META, 'bytes:recipes') or 0) + size
local of_trainers = call('HGET', META, 'recipes') or ''
for _, oldest in ipairs(kept > MOST and look('ZRANGE', P .. 'recipes', 0, -1) or {}) do
  if kept <= MOST then break end
  if oldest ~= id and not string.find(of_trainers, oldest, 1, true) then
    local held = tonumber(call('HGET', key_of(oldest), 'size') or 0)
    remove('recipes', oldest)
    call('DEL', key_of(oldest))
    add(META, 'bytes:recipes', -held)
    hold('serve', -held)
    kept = kept - held
  end
end
call('HSET', key_of(id), 'file_name', ARGV[2], 'source', ARGV[3], 'size', int(size))
add(META, 'bytes:recipes', size)
hold('serve', size)
return 1
