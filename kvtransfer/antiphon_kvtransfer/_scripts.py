"""The Lua scripts: each is one atomic change or one atomic look, so no reader ever sees half of anything.

Plain EVAL, no functions, no options newer than Redis 6.2; the same text runs on Redis 6.2 to 8 and on Valkey.
Writers prove by (incarnation, sequence, count) that Redis still holds what they last wrote before they add to it.
No script touches more than a page of hashes or workers, as Redis serves nobody else while one runs: a large set is
written in parts beside the old one and put in its place by one rename, and read in pages (`cluster.py` says how).
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
-- Renews the record and the times to live. Returns {status, sequence, intact, workers of the model}.
local record, index, blocks, workers, events = unpack(KEYS)
local worker, incarnation, started, value, record_ttl, index_ttl, events_max = unpack(ARGV)
local ttl = tonumber(index_ttl)
local held = redis.call('HMGET', index, 'incarnation', 'started_at_ms')
if held[1] and held[1] ~= incarnation and tonumber(held[2]) > tonumber(started) then return {1, '-1', 0, 0} end
if held[1] ~= incarnation then
  redis.call('UNLINK', index, blocks)
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
return {0, redis.call('HGET', index, 'sequence'), intact(index, blocks) and 1 or 0, redis.call('ZCARD', workers)}
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

WRITE_PART = (
    _COMMON
    + """
-- KEYS part; ARGV hashes part_ttl
-- A part of a whole set, beside the set. What nobody puts in place runs out by itself.
each('SADD', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {0}
"""
)

WRITE_ALL = (
    _COMMON
    + """
-- KEYS index blocks events part
-- ARGV worker incarnation started_at_ms sequence hashes count written index_ttl events_max
-- Replaces the whole set by the parts written before and the last one, `hashes`; `count` are all of them together, and
-- `written` names this writing of the set. A snapshot that arrives late, after a newer one, changes nothing.
local index, blocks, events, part = unpack(KEYS)
local worker, incarnation, started, sequence, hashes, count, written, index_ttl, events_max = unpack(ARGV)
local held = redis.call('HMGET', index, 'incarnation', 'started_at_ms', 'sequence')
local newer = held[1] and held[1] ~= incarnation and tonumber(held[2]) > tonumber(started)
if newer or held[1] == incarnation and intact(index, blocks) and tonumber(held[3]) > tonumber(sequence) then
  redis.call('UNLINK', part)
  return {1}
end
each('SADD', part, hashes)
if redis.call('SCARD', part) ~= tonumber(count) then
  redis.call('UNLINK', part)
  return {2}
end
redis.call('UNLINK', blocks)
if count ~= '0' then redis.call('RENAME', part, blocks) end
redis.call('DEL', index)
redis.call('HSET', index, 'incarnation', incarnation, 'started_at_ms', started, 'sequence', sequence, 'count', count,
  'written', written)
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
redis.call('UNLINK', record, index, blocks)
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
-- KEYS workers events model; ARGV record_prefix index_prefix page [worker ...]
-- Looks at some workers: those named, or else at the first ones of all.
-- Returns {run id, last event id, {{worker, record, incarnation, sequence}, ...}, record of the model, the others}: the
-- last event is not older than any row, and the others are the workers that were not looked at.
local page, first, names = tonumber(ARGV[3]), 4, ARGV
if #ARGV == 3 then first, names = 1, redis.call('ZRANGE', KEYS[1], 0, -1) end
local rows, others = {}, {}
for at = first, #names do
  local worker = names[at]
  if at < first + page then
    local record = redis.call('GET', ARGV[1] .. worker)
    local index = redis.call('HMGET', ARGV[2] .. worker, 'incarnation', 'sequence')
    if record or index[1] then rows[#rows + 1] = {worker, record or '', index[1] or '', index[2] or '-1'} end
  else
    others[#others + 1] = worker
  end
end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
return {run or '', last[1] and last[1][1] or '0-0', rows, redis.call('GET', KEYS[3]) or '', others}
"""

READ_PAGE = (
    _COMMON
    + """
-- KEYS index blocks; ARGV cursor page
-- A page of a worker's set, from cursor 0 on; the next cursor is 0 after the last page.
-- Returns {incarnation, sequence, written, next cursor, packed hashes}, or {} when there is no whole set to read.
local held = redis.call('HMGET', KEYS[1], 'incarnation', 'sequence', 'written')
if not held[1] or held[2] == '-1' or not intact(KEYS[1], KEYS[2]) then return {} end
local page = redis.call('SSCAN', KEYS[2], ARGV[1], 'COUNT', ARGV[2])
return {held[1], held[2], held[3] or '', page[1], table.concat(page[2])}
"""
)
