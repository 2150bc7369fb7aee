"""KV in files that instances share: a directory on a common file system as a store, without any service."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from baton.errors import DeadlineError, PipeClosedError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.blocks import BlockSource, FetchResult
from baton.kv_transfer.connector.background import settle
from baton.kv_transfer.connector.offload.block_folder import BlockFolder
from baton.kv_transfer.connector.staging import Lanes
from baton.kv_transfer.connector.store.backend import ChainPart, LoadProgress
from baton.kv_transfer.connector.store.client import leading
from baton.types import BlockHash, BlockId

log = logging.getLogger(__name__)

T = TypeVar("T")

_AHEAD = 3
"""Lanes that one load may fill and empty at the same time."""
_CLOSE_S = 5.0
"""How long an end waits for reads and writes under way."""


@dataclass(eq=False)
class _Lane:
    """A lane's slots, and the threads' work that may use them."""

    slots: list[int]
    jobs: list[Future[Any]] = field(default_factory=list)


class SharedStorage:
    """A directory as a store; see :class:`StoreBackend`. Files are read and written in threads.

    A file system that hangs costs a transfer its deadline: the lane that its thread still uses is given back when the
    thread is, and the pool is never touched by that thread.

    Args:
        folder: The files.
        pool: This instance's.
        fingerprint: What its blocks are.
        threads: Files that are read or written at once.
        blocks_per_call: Blocks in one lane, at most.
        kept: What the files hold; default: the same, undivided.
    """

    def __init__(
        self,
        folder: BlockFolder,
        pool: KVShards,
        fingerprint: Fingerprint,
        *,
        threads: int,
        blocks_per_call: int,
        kept: Fingerprint | None = None,
    ) -> None:
        self._folder = folder
        self._threads, self._num_threads = ThreadPoolExecutor(threads, thread_name_prefix="kv files"), threads
        self._lanes = Lanes(pool, fingerprint, max_blocks=blocks_per_call, kept=kept)
        self._running: set[Future[Any]] = set()

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
        names, lanes = list(part.wanted), self._lanes
        held = await self._each(self._folder.holds, [(name,) for name in names], deadline, [])
        missing = [i for i, there in enumerate(held) if not there]
        count, moved = sum(held), 0
        for at in range(0, len(missing), lanes.lane_blocks):
            piece = missing[at : at + lanes.lane_blocks]
            async with self._lane(deadline) as lane:
                ids, fences = [block_ids[i] for i in piece], [generations[i] for i in piece]
                valid = await lanes.collect(ids, fences, lane.slots, deadline)
                pairs = zip(piece, lane.slots, valid, strict=False)
                whole = [(names[i], lanes.arena.blocks[slot]) for i, slot, ok in pairs if ok]
                written = await self._each(self._folder.write, whole, deadline, lane.jobs)
            count, moved = count + len(written), moved + len(written) * self._folder.num_bytes
        return count, moved

    async def load(
        self,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        progress: LoadProgress,
        *,
        deadline: float,
        cancelled: threading.Event,
    ) -> None:
        """Copy the longest prefix whose files are there and whole; see :meth:`StoreBackend.load`."""
        names, step, started = part.wanted, self._lanes.lane_blocks, time.perf_counter()
        progress.pipe, progress.source = "files", str(self._folder.path)
        starts = iter(range(0, len(names), step))
        running: deque[asyncio.Task[FetchResult | None]] = deque()
        enough = threading.Event()  # not the caller's, who is told of what came also when the rest is called off
        try:
            whole = True
            while whole:
                for at in itertools.islice(starts, _AHEAD - len(running)):
                    piece, targets = names[at : at + step], block_ids[at : at + step]
                    running.append(asyncio.create_task(self._piece(piece, targets, deadline, enough)))
                if not running:
                    break
                result = await asyncio.shield(running[0])
                running.popleft()
                if result is None:
                    break
                progress.num_blocks += leading(result.valid)
                progress.num_bytes += result.num_bytes
                whole = progress.num_blocks % step == 0 and bool(result.valid.all())
        finally:
            progress.seconds += time.perf_counter() - started
            enough.set()
            for task in running:
                task.cancel()
            await settle(running)

    async def _piece(
        self, names: Sequence[BlockHash], targets: Sequence[BlockId], deadline: float, enough: threading.Event
    ) -> FetchResult | None:
        """Read files into a lane and copy the leading ones that are whole into the pool; ``None``: not even one is."""
        lanes = self._lanes
        async with self._lane(deadline) as lane:
            wanted = [(name, lanes.arena.blocks[slot]) for name, slot in zip(names, lane.slots, strict=False)]
            found = await self._each(self._folder.read, wanted, deadline, lane.jobs)
            count = found.index(False) if False in found else len(found)
            if not count:
                return None
            return await lanes.deliver(lane.slots[:count], targets[:count], deadline=deadline, cancelled=enough)

    async def close(self) -> None:
        """Wait for what is being read and written, but not for a file system that hangs."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if running := [asyncio.wrap_future(job) for job in self._running]:
            await asyncio.wait(running, timeout=_CLOSE_S)
        if self._running:
            log.warning("%s does not answer: %d files are left open", self._folder.path, len(self._running))
        else:
            await asyncio.to_thread(self._lanes.close)

    @asynccontextmanager
    async def _lane(self, deadline: float) -> AsyncIterator[_Lane]:
        """Have a lane, until its threads have left it too."""
        lane, loop = _Lane(await self._lanes.take(deadline)), asyncio.get_running_loop()
        try:
            yield lane
        finally:
            if late := [job for job in lane.jobs if not job.done()]:
                self._give_later(lane, late, loop)
            else:
                self._lanes.give(lane.slots)

    def _give_later(self, lane: _Lane, late: list[Future[Any]], loop: asyncio.AbstractEventLoop) -> None:
        left = len(late)

        def one_less() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._lanes.give(lane.slots)

        for job in late:
            job.add_done_callback(lambda _: loop.call_soon_threadsafe(one_less))

    async def _each(
        self, call: Callable[..., T], arguments: Sequence[tuple[Any, ...]], deadline: float, jobs: list[Future[Any]]
    ) -> list[T]:
        """Call a function with each of some arguments, in the threads, and note them in ``jobs``.

        Raises:
            DeadlineError: They take too long; those that run go on.
            BatonError: One of them failed; all have ended.
        """
        step = max(1, -(-len(arguments) // self._num_threads))
        mine: list[Future[list[T]]] = []
        try:
            for at in range(0, len(arguments), step):
                mine.append(self._threads.submit(_map, call, arguments[at : at + step]))
        except RuntimeError as error:
            raise PipeClosedError("the files were closed") from error
        finally:
            jobs += mine
            self._running.update(mine)
            for job in mine:
                job.add_done_callback(self._running.discard)
        waits = [asyncio.wrap_future(job) for job in mine]
        for wait in waits:
            wait.add_done_callback(lambda wait: wait.cancelled() or wait.exception())  # retrieved, also if nobody waits
        try:
            late = (await asyncio.wait(waits, timeout=max(0.0, deadline - time.monotonic())))[1] if waits else ()
        finally:
            for job in mine:
                job.cancel()  # those that have not begun
        if late:
            raise DeadlineError("the file system is too slow")
        return [value for wait in waits for value in wait.result()]


def _map(call: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
    return [call(*each) for each in arguments]
