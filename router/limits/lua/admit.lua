-- ARGV: request id, lease in ms, tokens to reserve, requests per minute, tokens per minute,
-- concurrent requests; an empty string is no limit. Nothing is taken unless everything passes.
-- Answers "VERDICT NOW_MS REQUESTS_LEVEL TOKENS_LEVEL", "-" for a level without a limit.
local request_id, lease_ms, num_tokens = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local requests_per_minute, tokens_per_minute = tonumber(ARGV[4]), tonumber(ARGV[5])
local max_concurrent = tonumber(ARGV[6])

local now = now_ms()
drop_expired_leases(now)
local reservation = redis.call('HGET', RESERVATIONS, request_id)
if reservation then
  return string.match(reservation, '^%d+ (.*)$')
end

local requests_level = level_of('requests', requests_per_minute, now)
local tokens_level = level_of('tokens', tokens_per_minute, now)

-- More than a full bucket holds is let through when it is full, and leaves a debt.
local function covers(level, per_minute, cost)
  return not level or level >= math.min(cost, per_minute) * UNIT
end

local function answer(verdict)
  local requests = requests_level and whole(requests_level) or '-'
  local tokens = tokens_level and whole(tokens_level) or '-'
  return table.concat({ verdict, whole(now), requests, tokens }, ' ')
end

if not covers(requests_level, requests_per_minute, 1) then
  return answer('rate')
end
if not covers(tokens_level, tokens_per_minute, num_tokens) then
  return answer('rate')
end
if max_concurrent and redis.call('ZCARD', LEASES) >= max_concurrent then
  return answer('concurrency')
end

if requests_level then
  requests_level = requests_level - UNIT
  write_level('requests', requests_level, now)
end
if tokens_level then
  tokens_level = tokens_level - num_tokens * UNIT
  write_level('tokens', tokens_level, now)
end
local admitted = answer('admitted')
redis.call('ZADD', LEASES, whole(now + lease_ms), request_id)
redis.call('HSET', RESERVATIONS, request_id, whole(num_tokens) .. ' ' .. admitted)
return admitted
