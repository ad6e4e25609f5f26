"""The Lua scripts: each is one atomic change or one atomic look, so no reader ever sees half of anything.

Plain EVAL, no functions, no options newer than Redis 6.2; the same text runs on Redis 6.2 to 8 and on Valkey.
Writers prove by (incarnation, sequence, count) that Redis still holds what they last wrote before they add to it.
Hashes travel packed, 16 bytes each, because one long string is far cheaper for client and server than many short.
"""

from __future__ import annotations

import enum


class WriteStatus(enum.IntEnum):
    """First element of a write script's reply."""

    OK = 0
    SUPERSEDED = 1
    """A later started incarnation owns this worker id; nothing was written."""
    MISMATCH = 2
    """Redis does not hold what the writer last wrote; nothing was written. Republish."""


_COMMON = """
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
-- Workers may have different times to live: a shared key keeps the longest.
local function renew(key, ttl)
  if redis.call('PTTL', key) < ttl then redis.call('PEXPIRE', key, ttl) end
end
local function each(command, key, packed)
  for first = 1, #packed, 16000 do
    local members = {}
    for at = first, math.min(first + 15999, #packed), 16 do
      members[#members + 1] = string.sub(packed, at, at + 15)
    end
    redis.call(command, key, unpack(members))
  end
end
local function intact(index, blocks)
  return tonumber(redis.call('HGET', index, 'count') or '-1') == redis.call('SCARD', blocks)
end
"""

HEARTBEAT = (
    _COMMON
    + """
-- KEYS record index blocks workers events
-- ARGV worker incarnation started_at_ms record record_ttl index_ttl events_max
-- Renews the record and the times to live. Returns {status, sequence, intact}.
local record, index, blocks, workers, events = unpack(KEYS)
local worker, incarnation, started, value, record_ttl, index_ttl, events_max = unpack(ARGV)
local ttl = tonumber(index_ttl)
local held = redis.call('HMGET', index, 'incarnation', 'started_at_ms')
if held[1] and held[1] ~= incarnation and tonumber(held[2]) > tonumber(started) then return {1, '-1', 0} end
if held[1] ~= incarnation then
  redis.call('DEL', index, blocks)
  redis.call('HSET', index, 'incarnation', incarnation, 'started_at_ms', started, 'sequence', '-1', 'count', '0')
end
if redis.call('GET', record) ~= value then
  redis.call('XADD', events, 'MAXLEN', '~', events_max, '*',
    'kind', 'record', 'worker', worker, 'incarnation', incarnation)
end
redis.call('SET', record, value, 'PX', record_ttl)
local now = now_ms()
redis.call('ZADD', workers, string.format('%d', now + ttl), worker)
redis.call('ZREMRANGEBYSCORE', workers, '-inf', string.format('%d', now))
local expiry = string.format('%d', now + ttl)
redis.call('PEXPIREAT', index, expiry)
redis.call('PEXPIREAT', blocks, expiry)
renew(workers, ttl)
renew(events, ttl)
return {0, redis.call('HGET', index, 'sequence'), intact(index, blocks) and 1 or 0}
"""
)

LIST_MODEL = (
    _COMMON
    + """
-- KEYS models; ARGV model index_ttl. Keeps the model in the list of models.
local now, ttl = now_ms(), tonumber(ARGV[2])
local held = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or '0')
if held < now + ttl then redis.call('ZADD', KEYS[1], string.format('%d', now + ttl), ARGV[1]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%d', now))
renew(KEYS[1], ttl)
return 1
"""
)

WRITE_DELTA = (
    _COMMON
    + """
-- KEYS index blocks events
-- ARGV worker incarnation previous sequence removed stored index_ttl events_max
-- Set, sequence and delta in one. A repeated write (its reply was lost) is recognised and does nothing.
local index, blocks, events = unpack(KEYS)
local worker, incarnation, previous, sequence, removed, stored, index_ttl, events_max = unpack(ARGV)
local held = redis.call('HMGET', index, 'incarnation', 'sequence')
if held[1] ~= incarnation or not intact(index, blocks) then return {2} end
if held[2] == sequence then return {0} end
if held[2] ~= previous then return {2} end
each('SREM', blocks, removed)
each('SADD', blocks, stored)
redis.call('HSET', index, 'sequence', sequence, 'count', redis.call('SCARD', blocks))
redis.call('XADD', events, 'MAXLEN', '~', events_max, '*', 'kind', 'delta', 'worker', worker,
  'incarnation', incarnation, 'previous', previous, 'sequence', sequence, 'removed', removed, 'stored', stored)
local expiry = string.format('%d', now_ms() + tonumber(index_ttl))
redis.call('PEXPIREAT', index, expiry)
redis.call('PEXPIREAT', blocks, expiry)
renew(events, tonumber(index_ttl))
return {0}
"""
)

WRITE_ALL = (
    _COMMON
    + """
-- KEYS index blocks events; ARGV worker incarnation started_at_ms sequence hashes index_ttl events_max
-- Replaces the whole set. A snapshot that arrives late, after a newer one, changes nothing.
local index, blocks, events = unpack(KEYS)
local worker, incarnation, started, sequence, hashes, index_ttl, events_max = unpack(ARGV)
local held = redis.call('HMGET', index, 'incarnation', 'started_at_ms', 'sequence')
if held[1] and held[1] ~= incarnation and tonumber(held[2]) > tonumber(started) then return {1} end
if held[1] == incarnation and intact(index, blocks) and tonumber(held[3]) > tonumber(sequence) then return {1} end
redis.call('DEL', index, blocks)
each('SADD', blocks, hashes)
redis.call('HSET', index, 'incarnation', incarnation, 'started_at_ms', started, 'sequence', sequence,
  'count', redis.call('SCARD', blocks))
redis.call('XADD', events, 'MAXLEN', '~', events_max, '*', 'kind', 'all', 'worker', worker,
  'incarnation', incarnation, 'sequence', sequence)
local expiry = string.format('%d', now_ms() + tonumber(index_ttl))
redis.call('PEXPIREAT', index, expiry)
redis.call('PEXPIREAT', blocks, expiry)
renew(events, tonumber(index_ttl))
return {0}
"""
)

WITHDRAW = (
    _COMMON
    + """
-- KEYS record index blocks workers events; ARGV worker incarnation index_ttl events_max
local record, index, blocks, workers, events = unpack(KEYS)
local held = redis.call('HGET', index, 'incarnation')
if held and held ~= ARGV[2] then return {1} end
redis.call('DEL', record, index, blocks)
redis.call('ZREM', workers, ARGV[1])
redis.call('XADD', events, 'MAXLEN', '~', ARGV[4], '*',
  'kind', 'withdrawn', 'worker', ARGV[1], 'incarnation', ARGV[2])
renew(events, tonumber(ARGV[3]))
return {0}
"""
)

READ_MODELS = (
    _COMMON
    + """
-- KEYS models
return redis.call('ZRANGEBYSCORE', KEYS[1], string.format('(%d', now_ms()), '+inf')
"""
)

READ_WORKERS = """
-- KEYS workers events model; ARGV record_prefix index_prefix
-- Returns {run id, last event id, {{worker, record, incarnation, sequence}, ...}, record of the model}: one look at
-- everything but the sets.
local rows = {}
for _, worker in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local record = redis.call('GET', ARGV[1] .. worker)
  local index = redis.call('HMGET', ARGV[2] .. worker, 'incarnation', 'sequence')
  if record or index[1] then rows[#rows + 1] = {worker, record or '', index[1] or '', index[2] or '-1'} end
end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
return {run or '', last[1] and last[1][1] or '0-0', rows, redis.call('GET', KEYS[3]) or ''}
"""

READ_BLOCKS = (
    _COMMON
    + """
-- KEYS index blocks. Returns {incarnation, sequence, packed hashes}, or {} when there is no whole set to read.
local held = redis.call('HMGET', KEYS[1], 'incarnation', 'sequence')
if not held[1] or held[2] == '-1' or not intact(KEYS[1], KEYS[2]) then return {} end
return {held[1], held[2], table.concat(redis.call('SMEMBERS', KEYS[2]))}
"""
)
