"""The Redis side: one stream of entries, and per instance a hash of who holds how many units of its capacity.

Units are leased, not reserved one by one: a reservation per request would put a round trip to Redis
(0.2 ms on one host, more over a network) before every placement and make requests depend on Redis. With units in hand a
placement is a comparison of two numbers. One script gives units out, and it alone, so their sum never exceeds the
capacity however many replicas ask at a time.

A Redis that comes back empty knows of no units. For ``SETTLE_MS`` it gives out none beyond what each replica says it
holds; and the first replica to come also writes down what it remembers of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from baton.rpc.redis import RedisStream, open_redis, redis_ms
from baton.rpc.service_token import Token
from baton_router.replication.wire import MAX_ENTRY_BYTES

SETTLE_MS = 3000
STREAM_LENGTH = 4096
READ_BLOCK_MS = 400
_READ_BACK_MS = 3000
_FIELDS_BYTES = 16 * 1024
"""Bytes of an entry beside its message: number, signature, names."""
_PAUSES = 5.0
_FRESH_MS = 10_000
"""Maximum time between an entry's signature and its arrival in the stream: older ones were replayed."""
_PURPOSE = b"stream of replicas in Redis"

_CLAIM = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local me, settle = ARGV[1], tonumber(ARGV[2])
local boot = tonumber(redis.call('GET', KEYS[2]) or '')
if not boot then boot = now; redis.call('SET', KEYS[2], now) end
redis.call('HSET', KEYS[1], me, now)
local grants = {}
for i = 3, #KEYS do
  local at = 3 + 4 * (i - 3)
  local capacity, claim = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
  local held, used = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local all, others = redis.call('HGETALL', KEYS[i]), 0
  for j = 1, #all, 2 do
    if all[j] ~= me then
      local seen = tonumber(redis.call('HGET', KEYS[1], all[j]) or '')
      if not seen then redis.call('HSET', KEYS[1], all[j], now) end
      others = others + tonumber(all[j + 1])
    end
  end
  local grant = math.max(0, math.min(claim, capacity - others))
  if now - boot < settle then grant = math.min(grant, held) end
  grant = math.max(grant, used)
  if grant > 0 then redis.call('HSET', KEYS[i], me, grant) else redis.call('HDEL', KEYS[i], me) end
  grants[#grants + 1] = grant
end
return grants
"""

_RECLAIM = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local seen = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '')
if not seen or now - seen < tonumber(ARGV[2]) then return 0 end
local held, keep = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or '0'), tonumber(ARGV[3])
if held <= keep then return 0 end
if keep > 0 then redis.call('HSET', KEYS[2], ARGV[1], keep) else redis.call('HDEL', KEYS[2], ARGV[1]) end
return held - keep
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """A replica's claim of units of one instance.

    Attributes:
        instance: Name of the instance.
        capacity: Units of the instance.
        units: Units that it wants to hold from now on.
        held: Units that it holds by its own count.
        used: Units in use, which are never reclaimed.
    """

    instance: str
    capacity: int
    units: int
    held: int
    used: int


class RedisLog:
    """What replicas keep in Redis.

    Args:
        url: ``redis://`` or ``rediss://`` URL.
        prefix: Prefix of every key.
        replica: Name of this replica.
        token: Shared token of the services; with one, entries that it has not signed are skipped.
        refused: Called with the reason of each refusal.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """

    def __init__(
        self, url: str, prefix: str, replica: str, token: Token | None, refused: Callable[[str], None]
    ) -> None:
        self._redis = open_redis(url, most=MAX_ENTRY_BYTES + _FIELDS_BYTES)
        self._token = token
        self._tell_refused = refused
        self._num_refused = 0
        self._ahead_ms = 0
        self._prefix = prefix
        self._replica = replica
        self._stream = f"{prefix}:replicas"
        self._claim = self._redis.register_script(_CLAIM)
        self._reclaim = self._redis.register_script(_RECLAIM)
        self._entries = RedisStream(self._redis, self._stream, lambda: self._refused("it is too long"))

    async def connect(self) -> None:
        """Check that Redis answers; reading begins a few seconds back."""
        now_ms = await redis_ms(self._redis)
        self._ahead_ms = now_ms - _monotonic_ms()
        self._entries.position = f"{max(0, now_ms - _READ_BACK_MS)}-0"

    async def close(self) -> None:
        await self._redis.aclose()

    async def disconnect(self) -> None:
        """Close connections that may hang; the next call opens others."""
        with contextlib.suppress(Exception):  # they are broken: that is why
            await self._redis.connection_pool.disconnect()

    async def publish(self, data: bytes) -> None:
        fields: dict[Any, Any] = {b"m": data}
        if self._token is not None:
            sent = b"%d" % (_monotonic_ms() + self._ahead_ms)
            fields |= {b"t": sent, b"mac": self._token.mac(_PURPOSE, self._signed(sent, data))}
        number: Any = await self._redis.xadd(self._stream, fields, maxlen=STREAM_LENGTH, approximate=True)
        self._ahead_ms = _entry_ms(number) - _monotonic_ms()  # Redis' clock may be set meanwhile

    async def read(self) -> AsyncIterator[list[bytes]]:
        """Yield entries as they come, several at a time."""
        while True:
            began = time.thread_time()
            refused = self._num_refused
            entries = await self._entries.read(READ_BLOCK_MS)
            if entries:
                yield [fields[b"m"] for number, fields in entries if self._is_believed(number, fields)]
            if self._num_refused > refused:  # entries of an unauthorized writer may use only a part of the time
                await asyncio.sleep(_PAUSES * (time.thread_time() - began))

    async def claim(self, claims: list[Claim]) -> list[int]:
        """Claim units for this replica; return how many were granted, per claim."""
        keys = [self._key("members"), self._key("boot"), *(self._units(x.instance) for x in claims)]
        numbers = [number for x in claims for number in (x.capacity, x.units, x.held, x.used)]
        answer: Any = await self._claim(keys=keys, args=[self._replica, SETTLE_MS, *numbers])
        return [int(x) for x in answer]

    async def remember(self, replica: str, held: Iterable[tuple[str, int]]) -> None:
        """Record the units that another replica was known to hold, where Redis has none recorded."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for instance, units in held:
                pipeline.hsetnx(self._units(instance), replica, str(units))
            await pipeline.execute()

    async def reclaim(self, replica: str, instance: str, *, silent_ms: int, keep: int) -> int:
        """Reclaim units beyond ``keep`` of a replica that has not contacted Redis for ``silent_ms``."""
        answer: Any = await self._reclaim(
            keys=[self._key("members"), self._units(instance)], args=[replica, silent_ms, keep]
        )
        return int(answer)

    async def release_all(self, instances: Iterable[str]) -> None:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for instance in instances:
                pipeline.hdel(self._units(instance), self._replica)
            pipeline.hdel(self._key("members"), self._replica)
            await pipeline.execute()

    def _refused(self, why: str) -> None:
        self._num_refused += 1
        self._tell_refused(why)

    def _is_believed(self, number: bytes | str, fields: dict[bytes, bytes]) -> bool:
        data = fields.get(b"m")
        if data is None or self._token is None:
            return data is not None
        sent = fields.get(b"t", b"")
        mac = fields.get(b"mac", b"")
        if not self._token.verifies(_PURPOSE, self._signed(sent, data), mac):
            self._refused("it is not signed with this side's token")
        elif abs(_entry_ms(number) - int(sent)) > _FRESH_MS:
            self._refused("it is an old one")
        else:
            return True
        return False

    def _signed(self, sent: bytes, data: bytes) -> bytes:
        return b"\0".join((self._stream.encode(), sent, data))

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _units(self, instance: str) -> str:
        return f"{self._prefix}:units:{instance}"


def _monotonic_ms() -> int:
    return int(1000 * time.monotonic())


def _entry_ms(number: bytes | str) -> int:
    """Return when Redis took an entry."""
    return int(number.partition(b"-")[0] if isinstance(number, bytes) else number.partition("-")[0])
