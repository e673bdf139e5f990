-- ARGV: requests per minute, tokens per minute (empty: no limit). Takes nothing; answers as admit.
local now = now_ms()
drop_expired_leases(now)
local function level(bucket, per_minute)
  local found = level_of(bucket, tonumber(per_minute), now)
  return found and whole(found) or '-'
end
return table.concat({ 'peek', whole(now), level('requests', ARGV[1]), level('tokens', ARGV[2]) }, ' ')
