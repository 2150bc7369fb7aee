"""Key-value services as stores: each block is a value, under a key of its fingerprint and hash.

A value begins with a header: magic, block hash, XXH3-128 of the rest. So a value that was cut off, damaged, or written
by another application under that key counts as missing. Bytes go through a staging arena in lanes of a few MiB.

Values are kept in Redis, or in a Mooncake Store if its package is installed: its master decides on placement and
eviction; bytes are moved by its own transfer engine between the processes that lend it memory.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import numpy.typing as npt
import xxhash

from baton.background import is_cancelled
from baton.config.secrets import shown_url
from baton.errors import ConfigError, DeadlineError, QueueFullError, TransferError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.connector.store.backend import LoadCall, SaveCall, SaveResult, StoreBackend, num_leading
from baton.kv_transfer.connector.store.host_memory import StagingLanes
from baton.rpc.redis import open_redis, open_redis_cluster, redis_errors
from baton.types import BlockHash

T = TypeVar("T")
_MAGIC = b"BATONRV1"
_HEADER = struct.Struct("<8s32s16s")
_PREFIX = b"baton:kv:"


def pack_value(block_hash: BlockHash, payload: npt.NDArray[np.uint8]) -> bytes:
    """Return a block's value: header and payload."""
    data = payload.data
    return b"".join((_HEADER.pack(_MAGIC, block_hash, xxhash.xxh3_128_digest(data)), data))


def unpack_value(value: bytes | None, block_hash: BlockHash, into: npt.NDArray[np.uint8]) -> bool:
    """Copy a block out of a value; ``False``: it is missing, damaged or another block, and nothing was copied."""
    if value is None or len(value) != _HEADER.size + len(into):
        return False
    magic, name, checksum = _HEADER.unpack_from(value)
    payload = memoryview(value)[_HEADER.size :]
    if magic != _MAGIC or name != block_hash or checksum != xxhash.xxh3_128_digest(payload):
        return False
    into[:] = np.frombuffer(payload, np.uint8)
    return True


class Values(Protocol):
    """A key-value service. Calls carry a few MiB at a time; all raise a ``BatonError`` if it does not answer.

    Attributes:
        kind: Kind of the service, shown as the pipe in traces.
        name: Name of the service for traces and errors, without secrets.
        max_bytes: Size limit of a value.
    """

    kind: str
    name: str
    max_bytes: int

    async def touch_keys(self, keys: Sequence[bytes]) -> list[bool]:
        """Return, per key, whether it exists; existing ones count as used."""

    async def get_values(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the keys' values; ``None``: there is none."""

    async def put_values(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        """Store keys and values; ``False``: there is no room for this one."""

    async def close(self) -> None:
        """Close all connections."""


class ValueStore(StoreBackend):
    """A key-value service as a store. Memory is allocated by the first call.

    Args:
        values: The service; closed with this object.
        pool: The instance's KV pool.
        fingerprint: Fingerprint of the pool's blocks.
        blocks_per_call: Largest number of blocks that are read or written at once.
        stored: Fingerprint of the stored blocks; default: that of the pool, undivided.
        stall_s: Seconds after which a load ends for which nothing has come.

    Raises:
        ConfigError: A block is too large for a value.
    """

    def __init__(
        self,
        values: Values,
        *,
        pool: KVShards,
        fingerprint: Fingerprint,
        blocks_per_call: int,
        stored: Fingerprint | None = None,
        stall_s: float = 3.0,
    ) -> None:
        stored = stored or fingerprint.undivided()
        if stored.block_bytes + _HEADER.size > values.max_bytes:
            message = f"a block of {stored.block_bytes} bytes is too large for a value of {values.kind}"
            raise ConfigError(message, field="kvstore")
        self.name = values.name
        self._values = values
        self._pool = pool
        self._fingerprint = fingerprint
        self._stored = stored
        self._blocks_per_call = blocks_per_call
        self._prefix = _PREFIX + stored.digest()[:16] + b":"
        self._stall_s = stall_s
        self._allocated: StagingLanes | None = None

    async def save(self, call: SaveCall) -> SaveResult:
        """Write the missing blocks. The call's source is this instance's pool and is not needed."""
        names = list(call.part.wanted)
        held = await self._await_until(call.deadline, self._values.touch_keys([self._prefix + name for name in names]))
        missing = [i for i, is_held in enumerate(held) if not is_held]
        lanes = self._lanes
        num_bytes = 0
        was_refused = False
        for start in range(0, len(missing), lanes.lane_blocks):
            piece = missing[start : start + lanes.lane_blocks]
            async with lanes.lane(call.deadline) as slots:
                valid = await lanes.collect(call, piece, slots)
                values = {
                    i: pack_value(names[i], lanes.arena.blocks[slot])
                    for i, slot, ok in zip(piece, slots, valid, strict=False)
                    if ok
                }
            items = [(self._prefix + names[i], value) for i, value in values.items()]
            stored = await self._await_until(call.deadline, self._values.put_values(items)) if items else []
            for i, is_stored in zip(values, stored, strict=True):
                held[i] = is_stored
                was_refused = was_refused or not is_stored
                num_bytes += is_stored * lanes.arena.block_bytes
        if was_refused and not any(held):
            raise QueueFullError(f"{self._values.kind} has no room", retry_after_s=1.0)
        return SaveResult(sum(held), num_bytes)

    async def load(self, call: LoadCall) -> None:
        progress = call.progress
        progress.pipe = self._values.kind
        progress.source = self._values.name
        names = list(call.part.wanted)
        lanes = self._lanes
        start = 0
        while start < len(names):
            piece = names[start : start + lanes.lane_blocks]
            started = time.perf_counter()
            deadline = min(call.deadline, time.monotonic() + self._stall_s)
            async with lanes.lane(deadline) as slots:
                count = await self._read_into(slots, piece, deadline)
                if count:
                    targets = call.block_ids[start : start + count]
                    result = await lanes.deliver(
                        slots[:count], targets, deadline=call.deadline, cancelled=call.cancelled
                    )
                    progress.num_blocks += num_leading(result.valid)
                    progress.num_bytes += result.num_bytes
            progress.seconds += time.perf_counter() - started
            start += len(piece)
            if progress.num_blocks < start:
                return

    async def close(self) -> None:
        await self._values.close()
        if self._allocated is not None:
            await asyncio.to_thread(self._allocated.close)
            self._allocated = None

    async def _read_into(self, slots: Sequence[int], names: Sequence[BlockHash], deadline: float) -> int:
        """Read blocks into a lane; returns how many leading ones exist and are undamaged."""
        values = await self._await_until(deadline, self._values.get_values([self._prefix + name for name in names]))
        for i, (name, value) in enumerate(zip(names, values, strict=True)):
            if not unpack_value(value, name, self._lanes.arena.blocks[slots[i]]):
                return i
        return len(names)

    async def _await_until(self, deadline: float, call: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                answer = await call
        except TimeoutError:
            raise DeadlineError(f"{self._values.kind} did not answer in time") from None
        if is_cancelled():  # asyncio.wait_for, within a client, may swallow it (Python 3.11)
            raise asyncio.CancelledError
        return answer

    @property
    def _lanes(self) -> StagingLanes:
        if self._allocated is None:
            self._allocated = StagingLanes(
                self._pool, self._fingerprint, max_blocks=self._blocks_per_call, stored=self._stored
            )
        return self._allocated


_MAX_VALUE_BYTES = 512 << 20  # limit of Redis
_OUT_OF_MEMORY = "OOM "


class RedisValues:
    """Values in a Redis. Connections are made with the first call.

    Args:
        url: ``redis://`` or ``rediss://`` URL, with ``+cluster`` before the colon for a cluster.
        timeout_s: Time limit in seconds for one value.
        ttl_s: Seconds for which a value is kept after its last use; 0: for ever.

    Raises:
        ConfigError: The client is not installed, or the URL cannot be read.
    """

    kind = "redis"
    max_bytes = _MAX_VALUE_BYTES

    def __init__(self, url: str, *, timeout_s: float, ttl_s: float) -> None:
        self.name = shown_url(url)
        self._ttl_ms = round(1000 * ttl_s)
        scheme, _, rest = url.partition("://")
        if scheme.endswith("+cluster"):
            address = f"{scheme.removesuffix('+cluster')}://{rest}"
            self._redis: Any = open_redis_cluster(address, timeout_s=timeout_s)
        else:
            self._redis = open_redis(url, timeout_s=timeout_s)

    async def touch_keys(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys exist, and restart their time to live."""
        if self._ttl_ms:
            answers = await self._run_pipeline([("PEXPIRE", key, self._ttl_ms) for key in keys])
        else:
            answers = await self._run_pipeline([("EXISTS", key) for key in keys])
        return [answer == 1 for answer in answers]

    async def get_values(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return values, and restart their time to live."""
        if self._ttl_ms:
            answers = await self._run_pipeline([("GETEX", key, "PX", self._ttl_ms) for key in keys])
        else:
            answers = await self._run_pipeline([("GET", key) for key in keys])
        for answer in answers:
            if isinstance(answer, Exception):
                raise TransferError(f"Redis did not answer with a block: {answer}") from answer
        return answers

    async def put_values(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        expiry = ("PX", self._ttl_ms) if self._ttl_ms else ()
        answers = await self._run_pipeline([("SET", key, value, *expiry) for key, value in items])
        for answer in answers:
            if isinstance(answer, Exception) and not str(answer).startswith(_OUT_OF_MEMORY):
                raise TransferError(f"Redis refused a block: {answer}") from answer
        return [not isinstance(answer, Exception) for answer in answers]

    async def close(self) -> None:
        await self._redis.aclose()

    async def _run_pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send commands in one pipeline; an answer may be an error."""
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
        except redis_errors() as error:
            raise TransferError(f"Redis is away: {error}") from error
        return answers


_THREADS = 4
_BUFFER_BYTES = 64 << 20
_MAX_MOONCAKE_BYTES = 16 << 20  # of the buffer, which several values share
_NO_ROOM = -200
_DEFAULTS = {"host": "127.0.0.1", "metadata": "P2PHANDSHAKE", "protocol": "tcp", "devices": "", "segment_bytes": "0"}


class MooncakeValues:
    """Values in a Mooncake Store. The connection is made with the first call.

    The store's calls block, so they run in threads of their own.

    Args:
        url: ``mooncake://host:port`` of the master. Query parameters: ``host``, this host's address for others;
            ``metadata``, the metadata server; ``protocol``, ``tcp`` or ``rdma``; ``devices``; ``segment_bytes``,
            memory that this process lends to the store.

    Raises:
        ConfigError: The package is not installed, or the URL cannot be read.
    """

    kind = "mooncake"
    max_bytes = _MAX_MOONCAKE_BYTES

    def __init__(self, url: str) -> None:
        self._options = mooncake_options(url)
        self.name = f"mooncake://{self._options['master']}"
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            message = f"kvstore: a Mooncake Store needs the package mooncake-transfer-engine[-non-cuda] ({error})"
            raise ConfigError(message, field="kvstore") from error
        self._make: Callable[[], Any] = MooncakeDistributedStore
        self._store: Any = None
        self._lock = asyncio.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "baton-mooncake")

    async def touch_keys(self, keys: Sequence[bytes]) -> list[bool]:
        names = _names(keys)
        answers = await self._call(lambda store: store.batch_is_exist(names))
        return [_checked(answer) == 1 for answer in answers]

    async def get_values(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return values; one that cannot be read counts as missing."""
        names = _names(keys)

        def get_batch(store: Any) -> list[bytes]:
            values: list[bytes] = store.get_batch(names)
            if values and not values[0]:  # missing, or the master does not answer: this call raises then
                _checked(store.is_exist(names[0]))
            return values

        return [value or None for value in await self._call(get_batch)]

    async def put_values(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        names = _names([key for key, _ in items])

        def put_each(store: Any) -> list[int]:
            return [store.put(name, value) for name, (_, value) in zip(names, items, strict=True)]

        answers = await self._call(put_each)
        return [answer != _NO_ROOM and _checked(answer) == 0 for answer in answers]

    async def close(self) -> None:
        """Disconnect, after calls that no caller waits for any more have ended."""

        def disconnect() -> None:
            self._threads.shutdown()
            if self._store is not None:
                self._store.close()
                self._store = None

        await asyncio.to_thread(disconnect)

    async def _call(self, work: Callable[[Any], T]) -> T:
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._store is None:
                self._store = await asyncio.shield(loop.run_in_executor(self._threads, self._connect))
        return await loop.run_in_executor(self._threads, work, self._store)

    def _connect(self) -> Any:
        options = self._options
        store = self._make()
        code = store.setup(
            options["host"],
            options["metadata"],
            int(options["segment_bytes"]),
            _BUFFER_BYTES,
            options["protocol"],
            options["devices"],
            options["master"],
        )
        if code:
            raise TransferError(f"{self.name} was not reached: error {code}")
        return store


def mooncake_options(url: str) -> dict[str, str]:
    """Parse a ``mooncake://`` URL into its parameters, with ``master`` and the defaults.

    Raises:
        ConfigError: The URL is malformed.
    """
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or port is None or parts.path not in ("", "/"):
        raise ConfigError(f"kvstore: {shown_url(url)} is not mooncake://host:port of a master", field="kvstore")
    unknown = set(given) - set(_DEFAULTS)
    if unknown:
        raise ConfigError(f"kvstore: {sorted(unknown)[0]} is no option of mooncake://", field="kvstore")
    options = {**_DEFAULTS, **given, "master": parts.netloc}
    if not options["segment_bytes"].isdigit():
        raise ConfigError("kvstore: segment_bytes is a number of bytes", field="kvstore")
    return options


def _names(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def _checked(code: int) -> int:
    if code < 0:
        raise TransferError(f"Mooncake Store failed: error {code}")
    return code
