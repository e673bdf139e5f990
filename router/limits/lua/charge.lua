-- ARGV: requests, tokens, requests per minute, tokens per minute. Takes them whatever the levels.
local now = now_ms()
local function take(bucket, per_minute, cost)
  local level = level_of(bucket, per_minute, now)
  if level then
    write_level(bucket, math.min(level - cost * UNIT, per_minute * UNIT), now)
  end
end
take('requests', tonumber(ARGV[3]), tonumber(ARGV[1]))
take('tokens', tonumber(ARGV[4]), tonumber(ARGV[2]))
