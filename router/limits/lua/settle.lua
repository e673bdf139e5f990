-- ARGV: request id, tokens used, tokens per minute (empty: no limit). Answers 1, or 0 when there
-- was nothing left to settle.
local request_id, num_tokens_used = ARGV[1], tonumber(ARGV[2])
local tokens_per_minute = tonumber(ARGV[3])

local now = now_ms()
drop_expired_leases(now)
local reservation = redis.call('HGET', RESERVATIONS, request_id)
if not reservation then
  return 0
end
redis.call('HDEL', RESERVATIONS, request_id)
redis.call('ZREM', LEASES, request_id)
-- What settlements add up to: equal to the audit's sum, and a test holds it there.
redis.call('HINCRBY', BUCKETS, 'settled_tokens', whole(num_tokens_used))

local level = level_of('tokens', tokens_per_minute, now)
if level then
  local num_tokens_reserved = tonumber(string.match(reservation, '^%d+'))
  level = level + (num_tokens_reserved - num_tokens_used) * UNIT
  write_level('tokens', math.min(level, tokens_per_minute * UNIT), now)
end
return 1
