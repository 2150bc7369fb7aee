"""Files and batches in Redis: for several routers, of which each may run a batch, and take it over from one that died.

A record is a hash of its status and its JSON; sorted sets hold the identifiers of a tenant's records, of the open
batches, and of all records by the time of their removal. A file's parts are a hash; its bytes are counted beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.errors import UnavailableError
from baton.rpc.redis import open_redis, redis_errors
from baton_router.frontend.batches.store import (
    BATCH_PREFIX,
    OPEN_STATES,
    BatchRecord,
    FileSize,
    LineResult,
    Record,
    decode_record,
    encode_record,
    prefix_of,
)

_TIMEOUT_S = 10.0
_DUE = 100
_PUT = """
local stored = redis.call('HGET', KEYS[1], 'status')
if ARGV[1] == '' and stored or ARGV[1] ~= '' and stored ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'status', ARGV[2], 'body', ARGV[3])
if not stored then redis.call('ZADD', KEYS[2], redis.call('INCR', KEYS[5]), ARGV[4]) end
redis.call('ZADD', KEYS[4], ARGV[5], ARGV[4])
if ARGV[6] == '1' then redis.call('ZADD', KEYS[3], redis.call('ZSCORE', KEYS[2], ARGV[4]), ARGV[4])
else redis.call('ZREM', KEYS[3], ARGV[4]) end
return 1
"""
_ADD_RESULTS = """
for i = 1, #ARGV, 3 do
  local own, other = KEYS[1 + ARGV[i]], KEYS[2 - ARGV[i]]
  if redis.call('HEXISTS', other, ARGV[i + 1]) == 0 and redis.call('HSETNX', own, ARGV[i + 1], ARGV[i + 2]) == 1 then
    redis.call('INCRBY', KEYS[3 + ARGV[i]], #ARGV[i + 2])
  end
end
"""
_READ_PARTS = """
local pieces, start, room = {}, tonumber(ARGV[1]), tonumber(ARGV[2])
for i = 3, #ARGV do
  local data = redis.call('HGET', KEYS[1], ARGV[i])
  if not data then break end
  local piece = string.sub(data, start + 1, start + room)
  pieces[#pieces + 1] = piece
  start, room = 0, room - #piece
  if room == 0 then break end
end
return pieces
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
        scripts = (_PUT, _ADD_RESULTS, _READ_PARTS, _CLAIM, _RELEASE)
        registered = map(self._redis.register_script, scripts)
        self._put, self._add_results, self._read_parts, self._claim, self._release = registered

    def _key(self, kind: str, name: str = "") -> str:
        return f"{self._prefix}:{kind}:{name}"

    async def write_record(self, record: Record, *, expected: str | None = None) -> bool:
        keys = [
            self._key("record", record.id),
            self._key("tenant", record.prefix + record.tenant),
            self._key("open"),
            self._key("due"),
            self._key("number"),
        ]
        is_open = int(isinstance(record, BatchRecord) and record.status in OPEN_STATES)
        args: list[Any] = [expected or "", record.status, encode_record(record), record.id, record.removed_at, is_open]
        return bool(await self._call(self._put(keys=keys, args=args)))

    async def get(self, ident: str) -> Record | None:
        prefix = prefix_of(ident)
        body = await self._call(self._redis.hget(self._key("record", ident), "body")) if prefix is not None else None
        return decode_record(prefix, body) if prefix is not None and body is not None else None

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
        return await self._records(await self._call(due))

    async def delete(self, record: Record) -> None:
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.delete(self._key("record", record.id), *self._file_keys(record.id))
            pipeline.zrem(self._key("tenant", record.prefix + record.tenant), record.id)
            pipeline.zrem(self._key("open"), record.id)
            pipeline.zrem(self._key("due"), record.id)
            await self._call(pipeline.execute())

    async def write_part(self, file_id: str, number: int, data: bytes) -> None:
        parts, size = self._file_keys(file_id)
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hset(parts, str(number), data)
            pipeline.incrby(size, len(data))
            await self._call(pipeline.execute())

    async def add_results(self, batch: BatchRecord, results: Sequence[LineResult]) -> None:
        output, output_size = self._file_keys(batch.output_id)
        errors, errors_size = self._file_keys(batch.error_id)
        args = [value for x in results for value in (int(x.failed), x.number, x.data)]
        await self._call(self._add_results(keys=[output, errors, output_size, errors_size], args=args))

    async def part_numbers(self, file_id: str) -> list[int]:
        parts, _ = self._file_keys(file_id)
        return sorted(int(x) for x in await self._call(self._redis.hkeys(parts)))

    async def read_parts(self, file_id: str, numbers: Sequence[int], start: int, most: int) -> list[bytes]:
        parts, _ = self._file_keys(file_id)
        return list(await self._call(self._read_parts(keys=[parts], args=[start, most, *numbers])))

    async def measure(self, file_id: str) -> FileSize:
        parts, size = self._file_keys(file_id)
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hlen(parts)
            pipeline.get(size)
            count, num_bytes = await self._call(pipeline.execute())
        return FileSize(count, int(num_bytes or 0))

    async def claim(self, batch_id: str, owner: str, seconds: float) -> bool:
        key = self._key("lease", batch_id)
        return bool(await self._call(self._claim(keys=[key], args=[owner, int(1000 * seconds)])))

    async def release(self, batch_id: str, owner: str) -> None:
        await self._call(self._release(keys=[self._key("lease", batch_id)], args=[owner]))

    async def close(self) -> None:
        await self._redis.aclose()

    def _file_keys(self, file_id: str) -> tuple[str, str]:
        return self._key("parts", file_id), self._key("size", file_id)

    async def _records(self, idents: list[bytes]) -> list[Record]:
        if not idents:
            return []
        names = [ident.decode() for ident in idents]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hget(self._key("record", name), "body")
            bodies = await self._call(pipeline.execute())
        known = [(prefix_of(name), body) for name, body in zip(names, bodies, strict=True)]
        return [decode_record(prefix, body) for prefix, body in known if prefix is not None and body is not None]

    async def _call(self, answer: Any) -> Any:
        try:
            return await answer
        except redis_errors() as error:
            raise UnavailableError("the store of batches fails", retry_after_s=1.0) from error
