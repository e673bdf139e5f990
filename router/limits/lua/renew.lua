-- ARGV: lease in ms, then request ids. Answers the ids whose lease was still held.
local now = now_ms()
drop_expired_leases(now)
local renewed = {}
for index = 2, #ARGV do
  if redis.call('ZSCORE', LEASES, ARGV[index]) then
    redis.call('ZADD', LEASES, whole(now + tonumber(ARGV[1])), ARGV[index])
    table.insert(renewed, ARGV[index])
  end
end
return renewed
