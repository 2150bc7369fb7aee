"""Files and batches in Redis: for several routers, of which each may run a batch, and take it over from one that died.

A record is a hash of its status and its JSON; sorted sets hold the identifiers of a tenant's records, of the open
batches, and of all records by the time of their removal. A file's parts are a hash; its bytes and lines are counted
beside it. What a tenant keeps is summed up from fields of the hashes of its records.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from baton.errors import UnavailableError
from baton.rpc.redis import open_redis, redis_errors
from baton_router.frontend.batches.store import (
    BATCH_PREFIX,
    FILE_PREFIX,
    LINE_PARTS,
    OPEN_STATES,
    PART_BYTES,
    BatchRecord,
    FileRecord,
    FileSize,
    LineResult,
    Record,
    RecordReader,
    Usage,
    encode_record,
    removed_with,
)

_TIMEOUT_S = 10.0
_DUE = 100
_USAGE = """
local function usage_of(files, batches, records, sizes)
  local num_files, size, num_batches = 0, 0, 0
  for _, ident in ipairs(redis.call('ZRANGE', files, 0, -1)) do
    local stored = redis.call('HMGET', records .. ident, 'status', 'size')
    if stored[1] then num_files, size = num_files + 1, size + (stored[2] or 0) end
  end
  for _, ident in ipairs(redis.call('ZRANGE', batches, 0, -1)) do
    local stored = redis.call('HMGET', records .. ident, 'is_open', 'output', 'error')
    if stored[1] == '1' then
      num_batches = num_batches + 1
      for file = 2, 3 do size = size + (redis.call('GET', sizes .. stored[file]) or 0) end
    end
  end
  return {num_files, size, num_batches}
end
"""
_GET_USAGE = f"{_USAGE} return usage_of(KEYS[1], KEYS[2], KEYS[3], KEYS[4])"
_PUT = f"""{_USAGE}
local stored = redis.call('HGET', KEYS[1], 'status')
if ARGV[1] == '' and stored or ARGV[1] ~= '' and stored ~= ARGV[1] then return 0 end
if ARGV[10] then
  local usage = usage_of(KEYS[6], KEYS[7], KEYS[8], KEYS[9])
  for i = 1, 3 do if usage[i] > tonumber(ARGV[9 + i]) then return usage end end
end
redis.call('HSET', KEYS[1], 'status', ARGV[2], 'body', ARGV[3])
redis.call('HSET', KEYS[1], 'is_open', ARGV[6], 'size', ARGV[7], 'output', ARGV[8], 'error', ARGV[9])
if not stored then redis.call('ZADD', KEYS[2], redis.call('INCR', KEYS[5]), ARGV[4]) end
redis.call('ZADD', KEYS[4], ARGV[5], ARGV[4])
if ARGV[6] == '1' then redis.call('ZADD', KEYS[3], redis.call('ZSCORE', KEYS[2], ARGV[4]), ARGV[4])
else redis.call('ZREM', KEYS[3], ARGV[4]) end
return 1
"""
_ADD_RESULTS = """
if redis.call('EXISTS', KEYS[7]) == 0 then return end
local is_new = false
for i = 1, #ARGV, 4 do
  local failed, is_first, number, data = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local own, other = KEYS[1 + failed], KEYS[2 - failed]
  if is_first == '1' then
    is_new = redis.call('HEXISTS', own, number) == 0 and redis.call('HEXISTS', other, number) == 0
    if is_new then redis.call('INCR', KEYS[5 + failed]) end
  end
  if is_new then
    redis.call('HSET', own, number, data)
    redis.call('INCRBY', KEYS[3 + failed], #data)
  end
end
"""
_READ_PARTS = f"""
local parts, room = {{}}, {PART_BYTES}
for i = 1, #ARGV do
  local data = redis.call('HGET', KEYS[1], ARGV[i])
  if not data then break end
  room = room - #data
  if room < 0 and i > 1 then break end
  parts[i] = data
end
return parts
"""
_CLAIM = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class RedisBatchStore:
    """A :class:`~baton_router.frontend.batches.store.BatchStore` in Redis.

    Args:
        url: URL of Redis.
        prefix: Prefix of the keys.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """

    def __init__(self, url: str, prefix: str) -> None:
        self._redis = open_redis(url, timeout_s=_TIMEOUT_S)
        self._prefix = f"{prefix}:batches"
        self._reader = RecordReader()
        register = self._redis.register_script
        self._put, self._get_usage = register(_PUT), register(_GET_USAGE)
        self._add_results, self._read_parts = register(_ADD_RESULTS), register(_READ_PARTS)
        self._claim, self._release = register(_CLAIM), register(_RELEASE)

    def _key(self, kind: str, name: str = "") -> str:
        return f"{self._prefix}:{kind}:{name}"

    async def write_record(self, record: Record, *, expected: str | None = None, bounds: Usage | None = None) -> bool:
        keys = [
            self._key("record", record.id),
            self._key("tenant", record.prefix + record.tenant),
            self._key("open"),
            self._key("due"),
            self._key("number"),
            *self._usage_keys(record.tenant),
        ]
        is_open = int(isinstance(record, BatchRecord) and record.status in OPEN_STATES)
        args: list[Any] = [expected or "", record.status, encode_record(record), record.id, record.removed_at, is_open]
        size = record.size if isinstance(record, FileRecord) else 0
        files = (record.output_id, record.error_id) if isinstance(record, BatchRecord) else ("", "")
        most = bounds.before(record, is_new=expected is None) if bounds is not None else ()
        written = await self._call(self._put(keys=keys, args=[*args, size, *files, *most]))
        if bounds is not None and isinstance(written, list):
            raise Usage(*written).error(record, bounds)
        return bool(written)

    async def usage(self, tenant: str) -> Usage:
        return Usage(*await self._call(self._get_usage(keys=self._usage_keys(tenant))))

    def _usage_keys(self, tenant: str) -> list[str]:
        sets = [self._key("tenant", prefix + tenant) for prefix in (FILE_PREFIX, BATCH_PREFIX)]
        return [*sets, self._key("record"), self._key("size")]

    async def get(self, ident: str) -> Record | None:
        body = await self._call(self._redis.hget(self._key("record", ident), "body"))
        return self._reader.read(ident, body) if body is not None else None

    async def list_records(self, prefix: str, tenant: str) -> list[Record]:
        return await self._records(await self._call(self._redis.zrange(self._key("tenant", prefix + tenant), 0, -1)))

    async def batch_states(self, tenant: str) -> dict[str, str]:
        names = await self._call(self._redis.zrange(self._key("tenant", BATCH_PREFIX + tenant), 0, -1))
        idents = [name.decode() for name in names]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for ident in idents:
                pipeline.hget(self._key("record", ident), "status")
            states = await self._call(pipeline.execute())
        return {ident: state.decode() for ident, state in zip(idents, states, strict=True) if state is not None}

    async def open_batches(self) -> list[BatchRecord]:
        records = await self._records(await self._call(self._redis.zrange(self._key("open"), 0, -1)))
        return [record for record in records if isinstance(record, BatchRecord)]

    async def due_records(self, now: float) -> list[Record]:
        due = self._redis.zrangebyscore(self._key("due"), "-inf", now, start=0, num=_DUE)
        idents = await self._call(due)
        records = await self._records(idents)
        if unreadable := {ident.decode() for ident in idents} - {record.id for record in records}:
            await self._delete(list(unreadable), [])
        return records

    async def delete(self, record: Record) -> None:
        sets = [self._key("tenant", prefix + record.tenant) for prefix in (FILE_PREFIX, BATCH_PREFIX)]
        await self._delete(removed_with(record), sets)

    async def _delete(self, idents: Sequence[str], sets: Sequence[str]) -> None:
        async with self._redis.pipeline(transaction=True) as pipeline:
            for ident in idents:
                pipeline.delete(self._key("record", ident), *self._file_keys(ident))
            for name in (*sets, self._key("open"), self._key("due")):
                pipeline.zrem(name, *idents)
            await self._call(pipeline.execute())

    async def write_part(self, file_id: str, number: int, data: bytes) -> None:
        parts, size, _ = self._file_keys(file_id)
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hset(parts, str(number), data)
            pipeline.incrby(size, len(data))
            await self._call(pipeline.execute())

    async def add_results(self, batch: BatchRecord, results: Sequence[LineResult]) -> None:
        files = zip(self._file_keys(batch.output_id), self._file_keys(batch.error_id), strict=True)
        keys = [*itertools.chain(*files), self._key("record", batch.id)]
        args: list[Any] = []
        for result in results:
            for number, data in result.parts():
                args += (int(result.failed), int(number % LINE_PARTS == 0), number, data)
        await self._call(self._add_results(keys=keys, args=args))

    async def part_numbers(self, file_id: str) -> list[int]:
        parts, *_ = self._file_keys(file_id)
        return sorted(int(x) for x in await self._call(self._redis.hkeys(parts)))

    async def read_parts(self, file_id: str, numbers: Sequence[int]) -> list[bytes]:
        parts, *_ = self._file_keys(file_id)
        return list(await self._call(self._read_parts(keys=[parts], args=numbers)))

    async def measure(self, file_id: str) -> FileSize:
        _, size, lines = self._file_keys(file_id)
        return FileSize(*(int(x or 0) for x in await self._call(self._redis.mget(lines, size))))

    async def claim(self, batch_id: str, owner: str, seconds: float) -> bool:
        key = self._key("lease", batch_id)
        return bool(await self._call(self._claim(keys=[key], args=[owner, int(1000 * seconds)])))

    async def release(self, batch_id: str, owner: str) -> None:
        await self._call(self._release(keys=[self._key("lease", batch_id)], args=[owner]))

    async def close(self) -> None:
        await self._redis.aclose()

    def _file_keys(self, file_id: str) -> tuple[str, str, str]:
        return self._key("parts", file_id), self._key("size", file_id), self._key("lines", file_id)

    async def _records(self, idents: list[bytes]) -> list[Record]:
        if not idents:
            return []
        names = [ident.decode() for ident in idents]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hget(self._key("record", name), "body")
            bodies = await self._call(pipeline.execute())
        stored = [(name, body) for name, body in zip(names, bodies, strict=True) if body is not None]
        return [record for each in stored if (record := self._reader.read(*each)) is not None]

    async def _call(self, answer: Any) -> Any:
        try:
            return await answer
        except redis_errors() as error:
            raise UnavailableError("the store of batches fails", retry_after_s=1.0) from error
