-- The state of one team. Levels are counted in 1/60000 of a request or token: a refill of
-- elapsed_ms * per_minute is then a whole number, and no rounding ever adds up.
local UNIT = 60000
local BUCKETS, LEASES, RESERVATIONS = KEYS[1], KEYS[2], KEYS[3]

-- Neither tostring (14 digits) nor a float form may reach a stored number.
local function whole(number)
  return string.format('%.0f', number)
end

-- nil without a limit. A clock that stepped back refills nothing, then goes on from there.
local function level_of(bucket, per_minute, now)
  if not per_minute then
    return nil
  end
  local full = per_minute * UNIT
  local stored = redis.call('HMGET', BUCKETS, bucket, bucket .. '_ms')
  if not stored[1] then
    return full
  end
  local elapsed_ms = math.max(0, now - tonumber(stored[2]))
  return math.min(full, tonumber(stored[1]) + elapsed_ms * per_minute)
end

local function write_level(bucket, level, now)
  redis.call('HSET', BUCKETS, bucket, whole(level), bucket .. '_ms', whole(now))
end

-- A lease that ran out is settled at its reservation: nothing is owed and nothing comes back.
local function drop_expired_leases(now)
  local expired = redis.call('ZRANGEBYSCORE', LEASES, '-inf', whole(now))
  for _, request_id in ipairs(expired) do
    redis.call('ZREM', LEASES, request_id)
    redis.call('HDEL', RESERVATIONS, request_id)
  end
end
