"""Stores that keep bytes under keys, and know nothing of KV: each block is a value, under its fingerprint and hash.

A value begins with a header: magic, block hash, XXH3-128 of what follows. So a value that was cut off, damaged, or
written by another application under that key counts as missing.

Bytes go through a side arena in lanes of a few MiB, and from there into the pool with the same code, and the same
fences, that copy from any other source: so it makes no difference how the pool is cut up over ranks.

Values lie in Redis, or in a Mooncake Store where its package is installed: its master decides where values lie and
which go; bytes move by its own transfer engine between the processes that lend it memory.
"""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import numpy.typing as npt
import xxhash

from baton.config.secrets import shown_url
from baton.errors import ConfigError, DeadlineError, QueueFullError, TransferError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.blocks import BlockSource
from baton.kv_transfer.connector.staging import Lanes
from baton.kv_transfer.connector.store.backend import ChainPart, LoadProgress
from baton.kv_transfer.connector.store.client import leading
from baton.rpc.redis import open_redis, open_redis_cluster, redis_errors
from baton.types import BlockHash, BlockId

T = TypeVar("T")
_MAGIC = b"BATONRV1"
_HEADER = struct.Struct("<8s32s16s")
_PREFIX = b"baton:kv:"


def pack_value(block_hash: BlockHash, payload: npt.NDArray[np.uint8]) -> bytes:
    """Return a block as it is kept."""
    data = payload.data
    return b"".join((_HEADER.pack(_MAGIC, block_hash, xxhash.xxh3_128_digest(data)), data))


def unpack_value(value: bytes | None, block_hash: BlockHash, into: npt.NDArray[np.uint8]) -> bool:
    """Copy a block out of a value; ``False``: it is none of this name and size, or damaged, and nothing was copied."""
    if value is None or len(value) != _HEADER.size + len(into):
        return False
    magic, name, checksum = _HEADER.unpack_from(value)
    payload = memoryview(value)[_HEADER.size :]
    if magic != _MAGIC or name != block_hash or checksum != xxhash.xxh3_128_digest(payload):
        return False
    into[:] = np.frombuffer(payload, np.uint8)
    return True


class Values(Protocol):
    """Bytes under keys. Calls take a few MiB at a time; all fail with a ``BatonError`` when the store is away.

    Attributes:
        kind: What traces call the way there.
        name: What traces call the store.
        max_bytes: Largest value.
    """

    kind: str
    name: str
    max_bytes: int

    async def renew(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are there; those have been used."""

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return values; ``None`` where there is none."""

    async def put(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        """Keep values; ``False`` where there is no room."""

    async def close(self) -> None:
        """Close every connection."""


class ValueStore:
    """A store whose blocks are values; see :class:`StoreBackend`. Memory is taken with the first call.

    Args:
        values: Keeps them; belongs to this object from now on.
        pool: This instance's.
        fingerprint: What its blocks are.
        blocks_per_call: Blocks that are read or written at once, at most.
        kept: What values hold; default: the same, undivided.

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
        kept: Fingerprint | None = None,
    ) -> None:
        self._kept = whole = kept or fingerprint.undivided()
        if whole.block_bytes + _HEADER.size > values.max_bytes:
            message = f"a block of {whole.block_bytes} bytes is too large for a value of {values.kind}"
            raise ConfigError(message, field="kvstore")
        self._values, self._pool, self._fingerprint = values, pool, fingerprint
        self._blocks_per_call = blocks_per_call
        self._prefix = _PREFIX + whole.digest()[:16] + b":"
        self._staging: Lanes | None = None

    async def save(
        self,
        source: BlockSource,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        *,
        deadline: float,
    ) -> tuple[int, int]:
        """Write the blocks that are missing; see :meth:`StoreBackend.save`. ``source`` is this pool and not needed."""
        names = list(part.wanted)
        held = await self._within(deadline, self._values.renew([self._prefix + name for name in names]))
        missing = [i for i, there in enumerate(held) if not there]
        moved, refused = 0, False
        size = self._lanes().lane_blocks
        for at in range(0, len(missing), size):
            piece = missing[at : at + size]
            async with self._lanes().lane(deadline) as slots:
                valid = await self._lanes().collect(
                    [block_ids[i] for i in piece], [generations[i] for i in piece], slots, deadline
                )
                values = {
                    i: pack_value(names[i], self._lanes().arena.blocks[slot])
                    for i, slot, ok in zip(piece, slots, valid, strict=False)
                    if ok
                }
            items = [(self._prefix + names[i], value) for i, value in values.items()]
            kept = await self._within(deadline, self._values.put(items)) if items else []
            for i, there in zip(values, kept, strict=True):
                held[i], refused = there, refused or not there
                moved += there * self._lanes().arena.block_bytes
        if refused and not any(held):
            raise QueueFullError(f"{self._values.kind} has no room", retry_after_s=1.0)
        return sum(held), moved

    async def load(
        self,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        progress: LoadProgress,
        *,
        deadline: float,
        cancelled: threading.Event,
    ) -> None:
        """Copy the longest prefix that is there; see :meth:`StoreBackend.load`."""
        names, at, staging = list(part.wanted), 0, self._lanes()
        progress.pipe, progress.source = self._values.kind, self._values.name
        while at < len(names):
            piece = names[at : at + staging.lane_blocks]
            started = time.perf_counter()
            async with staging.lane(deadline) as slots:
                count = await self._fill(piece, slots, deadline)
                if count:
                    target = block_ids[at : at + count]
                    result = await staging.deliver(slots[:count], target, deadline=deadline, cancelled=cancelled)
                    progress.num_blocks += leading(result.valid)
                    progress.num_bytes += result.num_bytes
            progress.seconds += time.perf_counter() - started
            at += len(piece)
            if progress.num_blocks < at:
                return

    async def close(self) -> None:
        """Close every connection."""
        await self._values.close()
        if self._staging is not None:
            await asyncio.to_thread(self._staging.close)
            self._staging = None

    async def _fill(self, names: Sequence[BlockHash], slots: Sequence[int], deadline: float) -> int:
        """Read blocks into a lane; returns how many leading ones are there and whole."""
        values = await self._within(deadline, self._values.get([self._prefix + name for name in names]))
        for i, (name, value) in enumerate(zip(names, values, strict=True)):
            if not unpack_value(value, name, self._lanes().arena.blocks[slots[i]]):
                return i
        return len(names)

    async def _within(self, deadline: float, call: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                found = await call
        except TimeoutError:
            raise DeadlineError(f"{self._values.kind} did not answer in time") from None
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # asyncio.wait_for, within a client, may swallow it (Python 3.11)
            raise asyncio.CancelledError
        return found

    def _lanes(self) -> Lanes:
        if self._staging is None:
            own, most = self._fingerprint, self._blocks_per_call
            self._staging = Lanes(self._pool, own, max_blocks=most, kept=self._kept)
        return self._staging


_MAX_VALUE_BYTES = 512 << 20  # what Redis takes
_OUT_OF_MEMORY = "OOM "


class RedisValues:
    """Values in a Redis; see :class:`Values`. Connections are made with the first call.

    Args:
        url: ``redis://`` or ``rediss://``, with ``+cluster`` before the colon where it is a cluster.
        timeout_s: Seconds that Redis has for one value.
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

    async def renew(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are there, and give those their whole time again."""
        if self._ttl_ms:
            answers = await self._run([("PEXPIRE", key, self._ttl_ms) for key in keys])
        else:
            answers = await self._run([("EXISTS", key) for key in keys])
        return [answer == 1 for answer in answers]

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return values, and give them their whole time again."""
        if self._ttl_ms:
            answers = await self._run([("GETEX", key, "PX", self._ttl_ms) for key in keys])
        else:
            answers = await self._run([("GET", key) for key in keys])
        for answer in answers:
            if isinstance(answer, Exception):
                raise TransferError(f"Redis did not answer with a block: {answer}") from answer
        return answers

    async def put(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        """Keep values."""
        expiry = ("PX", self._ttl_ms) if self._ttl_ms else ()
        answers = await self._run([("SET", key, value, *expiry) for key, value in items])
        for answer in answers:
            if isinstance(answer, Exception) and not str(answer).startswith(_OUT_OF_MEMORY):
                raise TransferError(f"Redis refused a block: {answer}") from answer
        return [not isinstance(answer, Exception) for answer in answers]

    async def close(self) -> None:
        """Close every connection."""
        await self._redis.aclose()

    async def _run(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send commands in one go; an answer may be an error."""
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
    """Values in a Mooncake Store; see :class:`Values`. The connection is made with the first call.

    Its calls block, so they run in threads of their own.

    Args:
        url: ``mooncake://host:port`` of its master. After a question mark may stand: ``host``, this host's address for
            others; ``metadata``, the metadata server; ``protocol``, ``tcp`` or ``rdma``; ``devices``;
            ``segment_bytes``, memory that this process lends to the store.

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

    async def renew(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are there."""
        names = _names(keys)
        answers = await self._call(lambda store: store.batch_is_exist(names))
        return [_checked(answer) == 1 for answer in answers]

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return values; one that cannot be had counts as missing."""
        names = _names(keys)

        def get(store: Any) -> list[bytes]:
            found: list[bytes] = store.get_batch(names)
            if found and not found[0]:  # missing, or the master is away: this tells
                _checked(store.is_exist(names[0]))
            return found

        return [answer or None for answer in await self._call(get)]

    async def put(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        """Keep values."""
        names = _names([key for key, _ in items])

        def put(store: Any) -> list[int]:
            return [store.put(name, value) for name, (_, value) in zip(names, items, strict=True)]

        answers = await self._call(put)
        return [answer != _NO_ROOM and _checked(answer) == 0 for answer in answers]

    async def close(self) -> None:
        """Leave the store. Calls that no caller waits for any more end first."""

        def end() -> None:
            self._threads.shutdown()
            if self._store is not None:
                self._store.close()
                self._store = None

        await asyncio.to_thread(end)

    async def _call(self, work: Callable[[Any], T]) -> T:
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._store is None:
                self._store = await asyncio.shield(loop.run_in_executor(self._threads, self._connect))
        return await loop.run_in_executor(self._threads, work, self._store)

    def _connect(self) -> Any:
        options, store = self._options, self._make()
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
    """Read a URL.

    Raises:
        ConfigError: It cannot be read; says why.
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
