"""A client in a process of its own: ``python -m baton_bench.store.client --fd N``. The driver sends it orders."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

import msgspec

from baton.errors import ConfigError, InvalidRequestError, TransferError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.blocks import BlockFetcher, BlockServer
from baton.kv_transfer.connector.store.backend import ChainPart, LoadCall, SaveCall
from baton.kv_transfer.connector.store.client import StoreClient
from baton.kv_transfer.types import Bytes
from baton.types import BlockHash, BlockId, InstanceId
from baton_bench.agents import Order, serve_agent
from baton_bench.store.plan import (
    MAX_SAMPLES,
    OpenSpec,
    Pattern,
    TurnResult,
    TurnSpec,
    VerifyResult,
    chain_names,
)

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
        fingerprint: Model, dtype and layout of the blocks.
        kind: Kind of the pipe.
        name: Name of the client.

    Attributes:
        last: Names of the last chain that :meth:`put_new` put.
    """

    def __init__(self, address: str, arena: HostArena, fingerprint: Fingerprint, kind: str, name: str) -> None:
        self._arena = arena
        self._half = arena.num_blocks // 2
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
        ids = [BlockId(i) for i in range(len(names))]
        call = LoadCall(ChainPart(names, 0, len(names)), ids, time.monotonic() + CALL_S)
        await self._client.load(call)
        return call.progress.num_blocks

    async def put_chain(self, names: Sequence[BlockHash], turn: int = 0) -> int:
        """Put the second half under these names; see :data:`Once`."""
        ids = [BlockId(self._half + i) for i in range(len(names))]
        generations = self._arena.generations[ids].tolist()
        part = ChainPart(names, 0, len(names))
        call = SaveCall(self._server.source, part, ids, generations, time.monotonic() + CALL_S)
        return (await self._client.save(call)).num_blocks

    async def put_new(self, names: Sequence[BlockHash], turn: int = 0) -> int:
        """Put as many blocks under names that no store has seen: ``last``; see :data:`Once`."""
        noise = os.urandom(32 * len(names))
        self.last = [BlockHash(noise[at : at + 32]) for at in range(0, len(noise), 32)]
        return await self.put_chain(self.last)

    async def contains(self, names: Sequence[BlockHash], turn: int = 0) -> int:
        """Ask how many leading blocks of a chain the store holds; see :data:`Once`."""
        return await self._client.contains(names)

    async def settle(self) -> None:
        """Wait until the leases that are being returned have been sent."""
        await self._client.ping()

    async def close(self) -> None:
        await self._client.close()
        self._server.close()
        self._fetcher.close()


def memcpy(stack: ExitStack, arena: HostArena, source_bytes: int) -> Once:
    """One thread's ``memcpy`` of a request's bytes in one call, from memory that was touched and is too big to cache.

    Args:
        stack: Frees the memory.
        arena: Target.
        source_bytes: Size of the memory to copy from.
    """
    size = arena.block_bytes
    source = stack.enter_context(closing(HostArena(max(arena.num_blocks, source_bytes // size), size)))
    source.touch()
    to = arena.blocks.ctypes.data
    start = source.blocks.ctypes.data

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
                file = (file + 1) % len(files)
                at = 0
            jobs.append(pool.submit(_read_at, files[file], flat[begin : begin + size], at))
            at += size
        for job in jobs:
            job.result()
        return len(names)

    return once


def dd(path: Path, block_bytes: int) -> Once:
    """The program ``dd`` on one of the disk tier's files, a whole file per request."""
    files = segments(path)
    flags = ["iflag=direct"] if block_bytes % _PAGE == 0 else []

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
        port: Port of the Redis server.
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
        port: Port of the Redis server.
        target: uint8 [blocks, block_bytes].
    """
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), CALL_S))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wanted = b"$%d\r\n" % target.shape[1]

    async def once(names: Sequence[BlockHash], turn: int) -> int:
        sock.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names))
        head = bytearray(len(wanted))
        tail = bytearray(2)
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


_STORES = {"shm": ("dram", "shm"), "tcp": ("dram", "tcp"), "disk": ("disk", "shm")}
"""The store and the kind of pipe of each tier."""
_COPY_BYTES = 512 << 20
"""Bytes that the bare copy copies from: more than caches hold."""
_WIPED = 0xA5


class Client:
    """Carries out the orders of a ``baton bench store`` driver; its event loop runs during an order."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._opened: _Opened | None = None

    def orders(self) -> Mapping[str, Order]:
        return {
            "open": self._open,
            "fill": self._fill,
            "turn": self._turn,
            "verify": self._verify,
            "close": self._end,
        }

    def close(self) -> None:
        self._end()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _open(self, spec: OpenSpec) -> None:
        self._end()
        self._opened = _Opened(spec)

    def _fill(self, what: str, clients: Annotated[int, msgspec.Meta(ge=1)]) -> None:
        self._loop.run_until_complete(self._the_opened().fill(what, clients))

    def _turn(self, turn: TurnSpec) -> TurnResult:
        return self._loop.run_until_complete(self._the_opened().turn(turn))

    def _verify(self, turn: TurnSpec) -> VerifyResult:
        return self._loop.run_until_complete(self._the_opened().verify(turn))

    def _end(self) -> None:
        opened = self._opened
        self._opened = None
        if opened is not None:
            self._loop.run_until_complete(opened.close())

    def _the_opened(self) -> _Opened:
        if self._opened is None:
            raise InvalidRequestError("no client is open", field="do")
        return self._opened


class _Opened:
    """A client with its pool: the first half of its blocks is loaded into, the second half is put."""

    def __init__(self, spec: OpenSpec) -> None:
        self._spec = spec
        self._fingerprint = spec.plan.shape.fingerprint()
        self._size = self._fingerprint.block_bytes
        self._pattern = Pattern(self._size)
        self._arena = HostArena(2 * spec.plan.blocks, self._size)
        self._arena.touch()
        self._loaded = self._arena.blocks[: spec.plan.blocks]
        self._source = self._arena.blocks[spec.plan.blocks :]
        self._pattern.fill(chain_names(spec.seed, -1 - spec.index, spec.plan.blocks), self._source)
        self._names = [chain_names(spec.seed, chain, spec.plan.blocks) for chain in range(spec.plan.chains)]
        self._nowhere = [chain_names(spec.seed, -1_000_000 - i, spec.plan.blocks) for i in range(4)]
        self._methods: dict[tuple[str, str], Once] = {}
        self._stack = contextlib.ExitStack()
        self._pipes: dict[tuple[str, str], StorePipe] = {}
        self._turns: dict[tuple[str, str], int] = {}

    async def fill(self, what: str, clients: int) -> None:
        """Store this client's share of the chains that will be read."""
        spec = self._spec
        chains = range(spec.index, spec.plan.redis_chains if what == "redis" else spec.plan.chains, clients)
        redis = redis_client(spec.where.redis) if what == "redis" else None
        pipe = self._pipe(what, "shm") if redis is None else None
        for chain in chains:
            self._pattern.fill(self._names[chain], self._source)
            if pipe is not None and await pipe.put_chain(self._names[chain]) != spec.plan.blocks:
                raise ConfigError("the store did not take a chain: it is too small", field="bytes")
            if redis is not None:
                for name, block in zip(self._names[chain], self._source, strict=True):
                    redis.set(name, memoryview(block))
        if redis is not None:
            redis.close()
        self._pattern.fill(chain_names(spec.seed, -1 - spec.index, spec.plan.blocks), self._source)

    async def turn(self, spec: TurnSpec) -> TurnResult:
        """Make requests one after the other until the time is up."""
        once = self._method(spec)
        done = self._turns.get((spec.method, spec.op), 0)
        samples: list[float] = []
        hits = blocks = 0
        cpu = time.process_time()
        await asyncio.sleep(max(0.0, spec.start - time.monotonic()))
        start = now = time.monotonic()
        while len(samples) < MAX_SAMPLES and (not samples or now < spec.start + spec.seconds):
            hit = (done + 1) * spec.hit_percent // 100 > done * spec.hit_percent // 100
            names = self._chain_at(spec, hits) if hit else self._nowhere[done % len(self._nowhere)]
            began = time.perf_counter()
            blocks += await once(names, done)
            samples.append(round(time.perf_counter() - began, 7))
            hits += hit
            done += 1
            now = time.monotonic()
        self._turns[spec.method, spec.op] = done
        cpu = time.process_time() - cpu
        await self._settle()
        return TurnResult(start, now, blocks, hits, cpu, samples)

    async def verify(self, spec: TurnSpec) -> VerifyResult:
        """Compare every byte of this client's chains, loaded again, or of a chain that it puts."""
        wrong = checked = 0
        if spec.op == "put" and spec.method in _STORES:
            pipe = self._store_pipe(spec.method, spec.op)
            self._loaded[:] = _WIPED
            await pipe.put_new(self._names[0])
            checked = await pipe.get(pipe.last)
            wrong = sum(bool((self._loaded[i] != self._source[i]).any()) for i in range(checked))
        else:
            once = self._method(spec)
            for names in self._names[self._spec.index : self._among(spec) : spec.clients]:
                self._loaded[:] = _WIPED
                came = await once(names, 0)
                checked += came
                wrong += self._pattern.wrong(names[:came], self._loaded[:came])
        await self._settle()
        return VerifyResult(wrong, checked)

    async def close(self) -> None:
        self._stack.close()
        for pipe in self._pipes.values():
            await pipe.close()
        self._arena.close()

    async def _settle(self) -> None:
        for pipe in self._pipes.values():
            await pipe.settle()

    def _chain_at(self, spec: TurnSpec, hits: int) -> list[BlockHash]:
        """Return the chain to request after ``hits`` others: clients take turns."""
        return self._names[(spec.first + self._spec.index + hits * spec.clients) % self._among(spec)]

    def _among(self, spec: TurnSpec) -> int:
        return self._spec.plan.redis_chains if spec.method.startswith("redis") else self._spec.plan.chains

    def _pipe(self, store: str, kind: str) -> StorePipe:
        key = (store, kind)
        if key not in self._pipes:
            address = str(getattr(self._spec.where, store))
            name = f"client-{self._spec.index}-{store}-{kind}"
            self._pipes[key] = StorePipe(address, self._arena, self._fingerprint, kind, name)
        return self._pipes[key]

    def _store_pipe(self, method: str, op: str) -> StorePipe:
        store, kind = _STORES[method]
        return self._pipe(f"{store}_put" if op == "put" else store, kind)

    def _method(self, spec: TurnSpec) -> Once:
        key = (spec.method, spec.op)
        if key not in self._methods:
            self._methods[key] = self._make(*key)
        return self._methods[key]

    def _make(self, method: str, op: str) -> Once:
        where = self._spec.where
        stack = self._stack
        if method in _STORES:
            pipe = self._store_pipe(method, op)
            return {"get": pipe.get, "put": pipe.put_new, "contains": pipe.contains}[op]
        if method == "redis":
            if op == "put":
                return redis_set(stack, where.redis, self._source)
            return redis_pipeline(stack, where.redis, "exists" if op == "contains" else "get")
        makers: dict[str, Callable[[], Once]] = {
            "memcpy": lambda: memcpy(stack, self._arena, _COPY_BYTES),
            "plain": lambda: plain_reads(stack, Path(where.disk_path), self._loaded, self._spec.readers),
            "dd": lambda: dd(Path(where.disk_path), self._size),
            "redis-mget": lambda: redis_mget(stack, where.redis),
            "redis-bare": lambda: bare_get(stack, where.redis, self._loaded),
        }
        if method not in makers:
            raise InvalidRequestError("no such method", field="method")
        return makers[method]()


if __name__ == "__main__":
    sys.exit(serve_agent(lambda host, token, line: Client()))
