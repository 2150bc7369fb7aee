"""What a client does with the blocks of one request: Baton's store, and what stands beside it."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from baton.errors import ConfigError, TransferError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.blocks import BlockFetcher, BlockServer
from baton.kv_transfer.connector.store.backend import ChainPart, LoadProgress
from baton.kv_transfer.connector.store.client import StoreClient
from baton.kv_transfer.types import Bytes
from baton.types import BlockHash, BlockId, InstanceId

CALL_S = 120.0
"""Longest time (seconds) that one request may take."""
_PAGE = 4096
_DD_BYTES = 4 << 20


class Method(Protocol):
    """Moves the blocks of a chain."""

    async def once(self, names: Sequence[BlockHash], turn: int) -> int:
        """Do one request; returns the blocks that came, went or were found.

        Raises:
            BatonError: It failed.
        """

    async def close(self) -> None:
        """Close connections and free memory."""


class StorePipe:
    """A store reached over one kind of pipe: the client that connectors use.

    Args:
        address: gRPC address of the store.
        arena: The first half of its blocks is loaded into, the second half is put.
        fingerprint: What the blocks are.
        kind: Of the pipe.
        name: Of the client.
    """

    def __init__(self, address: str, arena: HostArena, fingerprint: Fingerprint, kind: str, name: str) -> None:
        self._arena, self._half = arena, arena.num_blocks // 2
        self._server = BlockServer(arena, fingerprint, InstanceId(name), kinds=(kind,))
        self._fetcher = BlockFetcher(arena, fingerprint, kinds=(kind,), max_threads=1)
        self._client = StoreClient(
            address,
            fingerprint=fingerprint,
            fetcher=self._fetcher,
            token=None,
            call_timeout_s=CALL_S,
            blocks_per_call=self._half,
        )

    async def load(self, names: Sequence[BlockHash]) -> int:
        """Load a chain into the first half; returns the blocks that came."""
        progress = LoadProgress()
        ids = [BlockId(i) for i in range(len(names))]
        part = ChainPart(names, 0, len(names))
        deadline = time.monotonic() + CALL_S
        await self._client.load(part, ids, progress, deadline=deadline, cancelled=threading.Event())
        return progress.num_blocks

    async def save(self, names: Sequence[BlockHash]) -> int:
        """Put the second half under these names; returns the blocks that the store holds then."""
        ids = [BlockId(self._half + i) for i in range(len(names))]
        generations = self._arena.generations[ids].tolist()
        part = ChainPart(names, 0, len(names))
        deadline = time.monotonic() + CALL_S
        return (await self._client.save(self._server.source, part, ids, generations, deadline=deadline))[0]

    async def contains(self, names: Sequence[BlockHash]) -> int:
        """Ask how many leading blocks of a chain the store holds."""
        return await self._client.contains(names)

    async def settle(self) -> None:
        """Have the leases given back that are on their way: they go out while the event loop runs, before this call."""
        await self._client.ping()

    async def close(self) -> None:
        """Close it."""
        await self._client.close()
        self._server.close()
        self._fetcher.close()


class Get:
    """Loads a chain from a store."""

    def __init__(self, pipe: StorePipe) -> None:
        self._pipe = pipe

    async def once(self, names: Sequence[BlockHash], turn: int) -> int:
        """Load; see :meth:`Method.once`."""
        return await self._pipe.load(names)

    async def close(self) -> None:
        """Nothing is its own."""


class Put:
    """Puts blocks under names that no store has seen.

    Attributes:
        last: Names of the last chain that was put.
    """

    def __init__(self, pipe: StorePipe) -> None:
        self.pipe = pipe
        self.last: list[BlockHash] = []

    async def once(self, names: Sequence[BlockHash], turn: int) -> int:
        """Put; see :meth:`Method.once`. What the names are does not matter, only how many."""
        noise = os.urandom(32 * len(names))
        self.last = [BlockHash(noise[at : at + 32]) for at in range(0, len(noise), 32)]
        return await self.pipe.save(self.last)

    async def close(self) -> None:
        """Nothing is its own."""


class Contains:
    """Asks how long a prefix the store holds."""

    def __init__(self, pipe: StorePipe) -> None:
        self._pipe = pipe

    async def once(self, names: Sequence[BlockHash], turn: int) -> int:
        """Ask; see :meth:`Method.once`."""
        return await self._pipe.contains(names)

    async def close(self) -> None:
        """Nothing is its own."""


class Memcpy:
    """One thread's ``memcpy`` of a request's bytes in one call, from memory that was touched and is too big to cache.

    Args:
        arena: Target.
        source_bytes: How much there is to copy from.
    """

    def __init__(self, arena: HostArena, source_bytes: int) -> None:
        self._size = arena.block_bytes
        self._from = HostArena(max(arena.num_blocks, source_bytes // arena.block_bytes), arena.block_bytes)
        self._from.touch()
        self._to, self._start = arena.blocks.ctypes.data, self._from.blocks.ctypes.data

    async def once(self, names: Sequence[BlockHash], turn: int) -> int:
        """Copy; see :meth:`Method.once`."""
        count = len(names)
        place = turn % (self._from.num_blocks // count) * count
        ctypes.memmove(self._to, self._start + place * self._size, count * self._size)
        return count

    async def close(self) -> None:
        """Free the source."""
        self._from.close()


class PlainRead:
    """Reads the disk tier's own files as fast as ``preadv`` does, with as many threads as the store has.

    Files whose blocks are whole pages are read around the page cache, as the store reads them.

    Args:
        path: Folder of the files.
        target: uint8 [blocks, block_bytes], page-aligned.
        readers: Threads.
    """

    def __init__(self, path: Path, target: Bytes, readers: int) -> None:
        direct = os.O_DIRECT if target.shape[1] % _PAGE == 0 else 0
        self._files = [os.open(file, os.O_RDONLY | direct) for file in segments(path)]
        self._flat, self._readers = memoryview(target.reshape(-1)), readers  # type: ignore[arg-type]
        self._pool = ThreadPoolExecutor(readers, "bench-read")
        self._sizes = [os.fstat(fd).st_size for fd in self._files]
        self._at = [0, 0]

    async def once(self, names: Sequence[BlockHash], turn: int) -> int:
        """Read as many bytes; see :meth:`Method.once`."""
        total = len(self._flat) // _PAGE * _PAGE
        step = -(-total // self._readers // _PAGE) * _PAGE
        jobs = []
        for begin in range(0, total, step):
            size = min(step, total - begin)
            fd, at = self._place(size)
            jobs.append(self._pool.submit(_read_at, fd, self._flat[begin : begin + size], at))
        for job in jobs:
            job.result()
        return len(names)

    async def close(self) -> None:
        """Close the files."""
        self._pool.shutdown()
        for fd in self._files:
            os.close(fd)

    def _place(self, size: int) -> tuple[int, int]:
        """Return the file and offset of the next bytes; files are read one after the other, over and over."""
        file, at = self._at
        for _ in range(len(self._files) + 1):
            if at + size <= self._sizes[file] // _PAGE * _PAGE:
                self._at = [file, at + size]
                return self._files[file], at
            file, at = (file + 1) % len(self._files), 0
        raise ConfigError("the disk tier's files are smaller than a request", field="bytes")


class Dd:
    """The program ``dd`` on one of the disk tier's files, a whole file per request."""

    def __init__(self, path: Path, block_bytes: int) -> None:
        self._files, self._block_bytes = segments(path), block_bytes
        self._flags = ["iflag=direct"] if block_bytes % _PAGE == 0 else []

    async def once(self, names: Sequence[BlockHash], turn: int) -> int:
        """Read a file; see :meth:`Method.once`."""
        file = self._files[turn % len(self._files)]
        command = ["dd", f"if={file}", "of=/dev/null", f"bs={_DD_BYTES}", *self._flags]
        done = subprocess.run(command, capture_output=True, timeout=CALL_S, check=False)  # noqa: ASYNC221 - alone here
        if done.returncode:
            raise TransferError(f"dd failed: {done.stderr.decode(errors='replace').strip()[-200:]}")
        return file.stat().st_size // self._block_bytes

    async def close(self) -> None:
        """Nothing is open."""


def segments(path: Path) -> list[Path]:
    """Return a disk tier's files, the biggest of them all, in order.

    Raises:
        ConfigError: There is none.
    """
    files = sorted(path.glob("segment-*"))
    most = max((file.stat().st_size for file in files), default=0)
    full = [file for file in files if file.stat().st_size >= most // 2]
    if not full or not most:
        raise ConfigError(f"{path} has no files of blocks", field="dir")
    return full


def _read_at(fd: int, view: memoryview, at: int) -> None:
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], at + done)
        if got <= 0:
            raise TransferError("a file ended early")
        done += got


TIMEOUT_S = 120.0


class RedisGet:
    """``redis-py``: a pipeline of GET, or EXISTS, per request. Values stay in ``bytes`` objects of their own."""

    def __init__(self, port: int, *, exists: bool = False) -> None:
        self._client, self._exists = connect(port), exists

    async def once(self, names: Sequence[BlockHash], turn: int) -> int:
        """Get; see :meth:`Method.once`."""
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            (pipeline.exists if self._exists else pipeline.get)(name)
        return sum(bool(value) for value in pipeline.execute())

    async def close(self) -> None:
        """Hang up."""
        self._client.close()


class RedisMget:
    """``redis-py``: one MGET per request."""

    def __init__(self, port: int) -> None:
        self._client = connect(port)

    async def once(self, names: Sequence[BlockHash], turn: int) -> int:
        """Get; see :meth:`Method.once`."""
        return sum(value is not None for value in self._client.mget(list(names)))

    async def close(self) -> None:
        """Hang up."""
        self._client.close()


class RedisSet:
    """``redis-py``: a pipeline of SET per request, over and over the same keys, so that Redis' memory stays bounded.

    Args:
        port: Of the server.
        values: uint8 [blocks, block_bytes].
    """

    def __init__(self, port: int, values: Bytes) -> None:
        self._client, self._values = connect(port), values

    async def once(self, names: Sequence[BlockHash], turn: int) -> int:
        """Set; see :meth:`Method.once`."""
        pipeline = self._client.pipeline(transaction=False)
        for i, name in enumerate(names):
            pipeline.set(b"put" + name, memoryview(self._values[i]))
        return sum(bool(done) for done in pipeline.execute())

    async def close(self) -> None:
        """Hang up."""
        self._client.close()


class BareGet:
    """GETs written to a bare socket ahead of their answers, which are received into the blocks themselves.

    No client library can be faster: nothing is parsed but lengths, nothing is copied, nothing is allocated.

    Args:
        port: Of the server.
        target: uint8 [blocks, block_bytes].
    """

    def __init__(self, port: int, target: Bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._target, self._size = target, target.shape[1]
        self._head = b"$%d\r\n" % self._size

    async def once(self, names: Sequence[BlockHash], turn: int) -> int:
        """Get; see :meth:`Method.once`. Only for keys that are there."""
        self._socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names))
        head, tail = bytearray(len(self._head)), bytearray(2)
        for i in range(len(names)):
            views = [memoryview(head), memoryview(self._target[i]), memoryview(tail)]
            while views:
                got = self._socket.recvmsg_into(views)[0]
                if not got:
                    raise TransferError("Redis hung up")
                while views and got >= len(views[0]):
                    got -= len(views.pop(0))
                if views:
                    views[0] = views[0][got:]
            if head != self._head:
                raise TransferError(f"Redis answered {bytes(head)!r}")
        return len(names)

    async def close(self) -> None:
        """Hang up."""
        self._socket.close()


def connect(port: int) -> Any:
    """Return a client with a connection of its own."""
    import redis  # optional: asked for where the plan is made

    return redis.Redis(port=port, socket_timeout=TIMEOUT_S)
