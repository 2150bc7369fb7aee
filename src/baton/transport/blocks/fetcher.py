"""Copies other instances' blocks into this instance's arena."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from baton.errors import CancelledError, ConfigError, FingerprintMismatchError, PipeClosedError, QueueFullError
from baton.kv.arena import KVArena
from baton.kv.fingerprint import Fingerprint
from baton.transport.block_types import BlockReads, BlockSource, FetchResult
from baton.transport.blocks.links import Connector, Link, LinkCache
from baton.transport.handshake import Facts
from baton.transport.pipe.memory import MemoryNetwork
from baton.transport.waiting import Flag, Wait

log = logging.getLogger(__name__)
AUTO_KINDS = ("memory", "shm", "tcp")
_PENDING_PER_THREAD = 64


class BlockFetcher:
    """Fetches blocks over the best pipe that reaches their source; thread safe.

    Connections are kept per source and epoch, dropped on errors and when idle.

    Args:
        arena: Target of all copies.
        fingerprint: What its blocks are; a source must have the same.
        kinds: Kinds of pipe in order of preference; ``"auto"``: shared memory where it reaches, else TCP.
        token: Shared token.
        max_threads: Threads of :meth:`fetch_async`.
        streams: TCP connections that one fetch is split over.
        idle_s: Seconds after which an unused connection is closed.
        memory: Network of the ``memory`` kind.
    """

    def __init__(
        self,
        arena: KVArena,
        fingerprint: Fingerprint,
        *,
        kinds: Sequence[str] | str = "auto",
        token: str | None = None,
        max_threads: int = 4,
        streams: int = 1,
        idle_s: float = 60.0,
        memory: MemoryNetwork | None = None,
    ) -> None:
        wanted = AUTO_KINDS if kinds == "auto" else (kinds,) if isinstance(kinds, str) else tuple(kinds)
        unknown = set(wanted) - set(AUTO_KINDS)
        if unknown or not wanted:
            raise ConfigError(f"pipes must be auto or some of {AUTO_KINDS}, got {kinds!r}", field="pipes")
        for name, value in (("max_threads", max_threads), ("streams", streams)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", field=name)
        self._arena, self._fingerprint = arena, fingerprint
        self._links = LinkCache(Connector(wanted, token, streams, memory), idle_s=idle_s)
        self._pool = ThreadPoolExecutor(max_threads, "baton-fetch")
        self._closing = threading.Event()
        self._room = threading.BoundedSemaphore(max_threads * _PENDING_PER_THREAD)

    def fetch(
        self,
        source: BlockSource,
        remote_ids: npt.ArrayLike,
        generations: npt.ArrayLike,
        local_ids: npt.ArrayLike,
        *,
        deadline: float,
        cancelled: Flag | None = None,
    ) -> FetchResult:
        """Copy blocks; blocks the calling thread. On return nothing writes into the local blocks any more.

        Args:
            source: Whose blocks.
            remote_ids: Blocks in the source's arena, [n].
            generations: The generation each had when it was offered, [n].
            local_ids: Where to, all different, [n].
            deadline: ``time.monotonic()`` seconds.
            cancelled: Set by another thread to give up.

        Returns:
            What came; blocks that are not ``valid`` must not be used.

        Raises:
            InvalidRequestError: Ids out of range or of different numbers.
            FingerprintMismatchError: The source's KV is not the same thing; names the field.
            StaleBlockError: The source was restarted.
            UnauthenticatedError: The tokens differ.
            PipeClosedError: No pipe reaches the source, or it went away meanwhile.
            DeadlineError, CancelledError: As their names say.
        """
        start = time.perf_counter()
        wait = Wait(deadline, _AnyOf(self._closing, cancelled))
        reads = BlockReads.of(remote_ids, generations, local_ids)
        reads.check_range(source.num_blocks, self._arena.num_blocks)
        self._fingerprint.require_equal(source.fingerprint, who="source")
        if source.fingerprint.block_bytes != self._arena.block_bytes:
            raise FingerprintMismatchError("blocks of another size than this arena's", field="block_bytes")
        if self._closing.is_set():
            raise PipeClosedError("the fetcher was closed")
        wait.check("starting a fetch")
        if len(reads) == 0:
            return FetchResult("", 0, time.perf_counter() - start, np.zeros(0, dtype=np.bool_))
        # In the source's order neighbours meet, and memory is read forwards.
        order = np.argsort(reads.remote_ids, kind="stable")
        try:
            link, found = self._read(source, reads.take(order), wait)
        except CancelledError as error:
            if self._closing.is_set():
                raise PipeClosedError("the fetcher was closed") from error
            raise
        valid = np.zeros(len(reads), dtype=np.bool_)
        valid[order] = found
        num_bytes = int(valid.sum()) * self._arena.block_bytes
        return FetchResult(link.pipe.kind, num_bytes, time.perf_counter() - start, valid, link.fallback_reason)

    async def fetch_async(
        self,
        source: BlockSource,
        remote_ids: npt.ArrayLike,
        generations: npt.ArrayLike,
        local_ids: npt.ArrayLike,
        *,
        deadline: float,
        cancelled: threading.Event | None = None,
    ) -> FetchResult:
        """Do :meth:`fetch` on a bounded thread pool.

        If the task is cancelled, this still returns only once nobody writes into the local blocks any more; it sets
        ``cancelled``.

        Raises:
            QueueFullError: Too many fetches wait for a thread.
        """
        if not self._room.acquire(blocking=False):
            raise QueueFullError("too many fetches wait for a thread", retry_after_s=1.0)
        flag = cancelled or threading.Event()

        def run() -> FetchResult:
            return self.fetch(source, remote_ids, generations, local_ids, deadline=deadline, cancelled=flag)

        try:
            job = self._pool.submit(run)
        except RuntimeError as error:
            self._room.release()
            raise PipeClosedError("the fetcher was closed") from error
        job.add_done_callback(lambda _: self._room.release())
        future = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if job.cancelled() and (task is None or not task.cancelling()):
                raise PipeClosedError("the fetcher was closed") from None
            flag.set()
            if not job.cancel():
                await _settled(future)
            raise

    def close(self) -> None:
        """Close all connections; fetches under way fail. Returns when their threads have ended."""
        self._closing.set()
        self._links.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, source: BlockSource, reads: BlockReads, wait: Wait) -> tuple[Link, npt.NDArray[np.bool_]]:
        facts = Facts(source.epoch, self._fingerprint, source.num_blocks, self._arena.block_bytes)
        while True:
            link, fresh = self._links.take(source, facts, wait)
            try:
                return link, link.pipe.read(reads, self._arena.blocks, wait)
            except PipeClosedError as error:
                self._links.drop(link)
                if fresh:
                    raise
                # The connection was an old one and may just have been idle for too long: once more on a new one.
                log.info("the %s pipe to %s was gone (%s): connecting again", link.pipe.kind, source.instance_id, error)
            finally:
                self._links.give(link)


class _AnyOf:
    """Set if the fetcher is closing, or the caller gave up."""

    def __init__(self, closing: Flag, cancelled: Flag | None) -> None:
        self._closing, self._cancelled = closing, cancelled

    def is_set(self) -> bool:
        return self._closing.is_set() or (self._cancelled is not None and self._cancelled.is_set())


async def _settled(future: asyncio.Future[FetchResult]) -> None:
    """Wait until a fetch has ended, however often this task is cancelled meanwhile."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()  # looked at: nobody else will
