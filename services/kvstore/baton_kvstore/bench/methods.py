"""What a client does with the blocks of one request: Baton's store, and what stands beside it."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

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


Once = Callable[[Sequence[BlockHash], int], Awaitable[int]]
"""Does one request for the blocks of a chain, the n-th of its kind; returns the blocks that came, went or were found.

Raises ``BatonError`` if it failed.
"""


class StorePipe:
    """A store reached over one kind of pipe: the client that connectors use.

    Args:
        address: gRPC address of the store.
        arena: The first half of its blocks is loaded into, the second half is put.
        fingerprint: What the blocks are.
        kind: Of the pipe.
        name: Of the client.

    Attributes:
        last: Names of the last chain that :meth:`put_new` put.
    """

    def __init__(self, address: str, arena: HostArena, fingerprint: Fingerprint, kind: str, name: str) -> None:
        self._arena, self._half = arena, arena.num_blocks // 2
        self.last: list[BlockHash] = []
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

    async def get(self, names: Sequence[BlockHash], turn: int = 0) -> int:
        """Load a chain into the first half; see :data:`Once`."""
        progress = LoadProgress()
        ids = [BlockId(i) for i in range(len(names))]
        part = ChainPart(names, 0, len(names))
        deadline = time.monotonic() + CALL_S
        await self._client.load(part, ids, progress, deadline=deadline, cancelled=threading.Event())
        return progress.num_blocks

    async def put(self, names: Sequence[BlockHash], turn: int = 0) -> int:
        """Put the second half under these names; see :data:`Once`."""
        ids = [BlockId(self._half + i) for i in range(len(names))]
        generations = self._arena.generations[ids].tolist()
        part = ChainPart(names, 0, len(names))
        deadline = time.monotonic() + CALL_S
        return (await self._client.save(self._server.source, part, ids, generations, deadline=deadline))[0]

    async def put_new(self, names: Sequence[BlockHash], turn: int = 0) -> int:
        """Put as many blocks under names that no store has seen: ``last``; see :data:`Once`."""
        noise = os.urandom(32 * len(names))
        self.last = [BlockHash(noise[at : at + 32]) for at in range(0, len(noise), 32)]
        return await self.put(self.last)

    async def contains(self, names: Sequence[BlockHash], turn: int = 0) -> int:
        """Ask how many leading blocks of a chain the store holds; see :data:`Once`."""
        return await self._client.contains(names)

    async def settle(self) -> None:
        """Have the leases given back that are on their way: they go out while the event loop runs, before this call."""
        await self._client.ping()

    async def close(self) -> None:
        """Close it."""
        await self._client.close()
        self._server.close()
        self._fetcher.close()


def memcpy(stack: ExitStack, arena: HostArena, source_bytes: int) -> Once:
    """One thread's ``memcpy`` of a request's bytes in one call, from memory that was touched and is too big to cache.

    Args:
        stack: Frees the memory.
        arena: Target.
        source_bytes: How much there is to copy from.
    """
    size = arena.block_bytes
    source = stack.enter_context(closing(HostArena(max(arena.num_blocks, source_bytes // size), size)))
    source.touch()
    to, start = arena.blocks.ctypes.data, source.blocks.ctypes.data

    async def once(names: Sequence[BlockHash], turn: int) -> int:
        place = turn % (source.num_blocks // len(names)) * len(names)
        ctypes.memmove(to, start + place * size, len(names) * size)
        return len(names)

    return once


def plain_reads(stack: ExitStack, path: Path, target: Bytes, readers: int) -> Once:
    """Reads of the disk tier's own files as fast as ``preadv`` does, with as many threads as the store has.

    Files whose blocks are whole pages are read around the page cache, as the store reads them; one after the other,
    over and over.

    Args:
        stack: Closes the files.
        path: Folder of the files.
        target: uint8 [blocks, block_bytes], page-aligned.
        readers: Threads.
    """
    direct = os.O_DIRECT if target.shape[1] % _PAGE == 0 else 0
    files = [os.open(file, os.O_RDONLY | direct) for file in segments(path)]
    for fd in files:
        stack.callback(os.close, fd)
    sizes = [os.fstat(fd).st_size // _PAGE * _PAGE for fd in files]
    flat = memoryview(target.reshape(-1))  # type: ignore[arg-type]
    total = len(flat) // _PAGE * _PAGE
    step = -(-total // readers // _PAGE) * _PAGE
    if max(sizes) < min(step, total):
        raise ConfigError("the disk tier's files are smaller than a request", field="bytes")
    pool = stack.enter_context(ThreadPoolExecutor(readers, "bench-read"))
    file = at = 0

    async def once(names: Sequence[BlockHash], turn: int) -> int:
        nonlocal file, at
        jobs = []
        for begin in range(0, total, step):
            size = min(step, total - begin)
            while at + size > sizes[file]:
                file, at = (file + 1) % len(files), 0
            jobs.append(pool.submit(_read_at, files[file], flat[begin : begin + size], at))
            at += size
        for job in jobs:
            job.result()
        return len(names)

    return once


def dd(path: Path, block_bytes: int) -> Once:
    """The program ``dd`` on one of the disk tier's files, a whole file per request."""
    files, flags = segments(path), ["iflag=direct"] if block_bytes % _PAGE == 0 else []

    async def once(names: Sequence[BlockHash], turn: int) -> int:
        file = files[turn % len(files)]
        command = ["dd", f"if={file}", "of=/dev/null", f"bs={_DD_BYTES}", *flags]
        done = subprocess.run(command, capture_output=True, timeout=CALL_S, check=False)  # noqa: ASYNC221 - alone here
        if done.returncode:
            raise TransferError(f"dd failed: {done.stderr.decode(errors='replace').strip()[-200:]}")
        return file.stat().st_size // block_bytes

    return once


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


def redis_client(port: int) -> Any:
    """Return a ``redis-py`` client with a connection of its own."""
    import redis  # optional: asked for where the plan is made

    return redis.Redis(port=port, socket_timeout=CALL_S)


def redis_pipeline(stack: ExitStack, port: int, command: str) -> Once:
    """``redis-py``: a pipeline of ``get`` or ``exists`` per request. Values stay in ``bytes`` objects of their own."""
    client = stack.enter_context(closing(redis_client(port)))

    async def once(names: Sequence[BlockHash], turn: int) -> int:
        pipeline = client.pipeline(transaction=False)
        for name in names:
            getattr(pipeline, command)(name)
        return sum(bool(value) for value in pipeline.execute())

    return once


def redis_mget(stack: ExitStack, port: int) -> Once:
    """``redis-py``: one MGET per request."""
    client = stack.enter_context(closing(redis_client(port)))

    async def once(names: Sequence[BlockHash], turn: int) -> int:
        return sum(value is not None for value in client.mget(list(names)))

    return once


def redis_set(stack: ExitStack, port: int, values: Bytes) -> Once:
    """``redis-py``: a pipeline of SET per request, over and over the same keys, so that Redis' memory stays bounded.

    Args:
        stack: Hangs up.
        port: Of the server.
        values: uint8 [blocks, block_bytes].
    """
    client = stack.enter_context(closing(redis_client(port)))

    async def once(names: Sequence[BlockHash], turn: int) -> int:
        pipeline = client.pipeline(transaction=False)
        for i, name in enumerate(names):
            pipeline.set(b"put" + name, memoryview(values[i]))
        return sum(bool(done) for done in pipeline.execute())

    return once


def bare_get(stack: ExitStack, port: int, target: Bytes) -> Once:
    """GETs written to a bare socket ahead of their answers, which are received into the blocks themselves.

    No client library can be faster: nothing is parsed but lengths, nothing is copied, nothing is allocated. Only for
    keys that are there.

    Args:
        stack: Hangs up.
        port: Of the server.
        target: uint8 [blocks, block_bytes].
    """
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), CALL_S))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wanted = b"$%d\r\n" % target.shape[1]

    async def once(names: Sequence[BlockHash], turn: int) -> int:
        sock.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names))
        head, tail = bytearray(len(wanted)), bytearray(2)
        for i in range(len(names)):
            views = [memoryview(head), memoryview(target[i]), memoryview(tail)]
            while views:
                got = sock.recvmsg_into(views)[0]
                if not got:
                    raise TransferError("Redis hung up")
                while views and got >= len(views[0]):
                    got -= len(views.pop(0))
                if views:
                    views[0] = views[0][got:]
            if head != wanted:
                raise TransferError(f"Redis answered {bytes(head)!r}")
        return len(names)

    return once
