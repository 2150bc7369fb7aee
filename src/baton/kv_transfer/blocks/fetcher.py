"""Copies other instances' blocks into this instance's arenas."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.errors import (
    CancelledError,
    ConfigError,
    FingerprintMismatchError,
    InvalidRequestError,
    PipeClosedError,
    QueueFullError,
)
from baton.kv_cache.arena import Arena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.reshard import ReshardPlan
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.blocks.links import LinkCache, LinkOptions, PeerConnection, PipeDialer
from baton.kv_transfer.blocks.plan import Part, SequenceBlocks, followed_parts, parts_of
from baton.kv_transfer.blocks.server import check_shards
from baton.kv_transfer.blocks.staging import StagedReader, Staging
from baton.kv_transfer.pipes.base import FollowingReadPipe, LayerRead, ReadPipe
from baton.kv_transfer.pipes.registry import resolve_kinds
from baton.kv_transfer.protocol.deadline import EitherFlag, Flag, Wait
from baton.kv_transfer.protocol.handshake import Facts
from baton.kv_transfer.types import BlockSource, FetchResult, Valid, bounds, require_below

log = logging.getLogger(__name__)
_PENDING_PER_THREAD = 64


class BlockFetcher:
    """Fetches blocks over the best pipe that reaches their source; thread safe.

    Connections are kept per source and epoch, dropped on errors and when idle.

    Args:
        pool: Target of all copies: the arenas of all ranks, or the only one.
        fingerprint: What its blocks are; a source's KV must be the same, however it is cut up. If it says ``kv_cast``,
            KV of another dtype is converted.
        kinds: Kinds of pipe in order of preference; ``"auto"``: as :func:`resolve_kinds` says.
        max_threads: Threads of :meth:`fetch_async`.
        links: How sources are reached.
    """

    def __init__(
        self,
        pool: KVShards | Arena,
        fingerprint: Fingerprint,
        *,
        kinds: Sequence[str] | str = "auto",
        max_threads: int = 4,
        links: LinkOptions | None = None,
    ) -> None:
        options = links or LinkOptions()
        wanted = resolve_kinds(kinds, options)
        for name, value in (("max_threads", max_threads), ("streams", options.tcp.streams)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", field=name)
        self._shards = pool if isinstance(pool, KVShards) else KVShards((pool,))
        check_shards(fingerprint, self._shards)
        self._fingerprint = fingerprint
        self._plan: tuple[Fingerprint, _SourcePlan] | None = None  # of the latest source; most are alike
        self._staging, self._device_staging = Staging(), Staging()
        self._mapped = all(arena.mapped for arena in self._shards.arenas)
        self._links = LinkCache(PipeDialer(wanted, options), idle_s=options.idle_s)
        self._pool = ThreadPoolExecutor(max_threads, "baton-fetch")
        self._closing = threading.Event()
        self._room = threading.BoundedSemaphore(max_threads * _PENDING_PER_THREAD)

    @property
    def pool(self) -> KVShards:
        """Target of all copies."""
        return self._shards

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
        """Copy blocks one to one; see :meth:`fetch_sequence`. The source's blocks must have this side's size.

        Args:
            source: Whose blocks.
            remote_ids: Blocks in the source's arenas, [n].
            generations: The generation each had when it was offered, [n].
            local_ids: Where to, all different, [n].
            deadline: ``time.monotonic()`` seconds.
            cancelled: Set by another thread to give up.

        Raises:
            FingerprintMismatchError: Also for blocks of another size.
            BatonError: As :meth:`fetch_sequence`.
        """
        blocks = SequenceBlocks.pairs(remote_ids, generations, local_ids)
        if source.fingerprint.block_size != self._fingerprint.block_size:
            raise FingerprintMismatchError("blocks of another size than this arena's", field="block_size")
        return self.fetch_sequence(source, blocks, deadline=deadline, cancelled=cancelled)

    def fetch_sequence(
        self, source: BlockSource, blocks: SequenceBlocks, *, deadline: float, cancelled: Flag | None = None
    ) -> FetchResult:
        """Copy blocks of a sequence, cut up as both sides need it; blocks the calling thread.

        On return nothing writes into the local blocks any more.

        Args:
            source: Whose blocks.
            blocks: Which, and where to; layer by layer as they are computed, if it says so.
            deadline: ``time.monotonic()`` seconds.
            cancelled: Set by another thread to give up.

        Returns:
            What arrived, per block of the source; blocks that are not ``valid`` must not be used.

        Raises:
            InvalidRequestError: Ids out of range or of different numbers.
            FingerprintMismatchError: The source's KV is not the same thing; names the field.
            StaleBlockError: The source was restarted.
            UnauthenticatedError: The tokens differ.
            PipeClosedError: No pipe reaches the source, or it went away meanwhile.
            DeadlineError, CancelledError: As their names say.
        """
        start = time.perf_counter()
        wait = Wait(deadline, EitherFlag(cancelled, self._closing))
        _check_range(blocks, source.num_blocks, self._shards.primary.num_blocks)
        source_plan = self._plan_for(source.fingerprint)
        if self._closing.is_set():
            raise PipeClosedError("the fetcher was closed")
        wait.check("starting a fetch")
        if len(blocks) == 0:
            return FetchResult("", 0, time.perf_counter() - start, np.zeros(0, dtype=np.bool_))
        try:
            link, fetched = self._read(source, source_plan, blocks, wait)
        except CancelledError as error:
            if self._closing.is_set():
                raise PipeClosedError("the fetcher was closed") from error
            raise
        return FetchResult(
            pipe_kind=link.pipe.kind,
            num_bytes=fetched.num_bytes,
            seconds=time.perf_counter() - start,
            valid=fetched.valid,
            fallback_reason=link.fallback_reason,
            waited_s=fetched.waited_s,
            num_out_of_range=len(fetched.out_of_range),
        )

    async def fetch_async(
        self,
        source: BlockSource,
        blocks: SequenceBlocks,
        *,
        deadline: float,
        cancelled: threading.Event | None = None,
    ) -> FetchResult:
        """Do :meth:`fetch_sequence` on a bounded thread pool.

        If the task is cancelled, this still returns only once nothing writes into the local blocks any more; it sets
        ``cancelled``.

        Raises:
            QueueFullError: Too many fetches wait for a thread.
        """
        if not self._room.acquire(blocking=False):
            raise QueueFullError("too many fetches wait for a thread", retry_after_s=1.0)
        flag = cancelled or threading.Event()

        def run() -> FetchResult:
            return self.fetch_sequence(source, blocks, deadline=deadline, cancelled=flag)

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

    def _plan_for(self, source: Fingerprint) -> _SourcePlan:
        known = self._plan
        if known is None or (known[0] is not source and known[0] != source):
            plan, mine = self._fingerprint.plan_from(source), self._fingerprint
            reader = StagedReader(source, mine, self._staging, self._device_staging)
            known = self._plan = source, _SourcePlan(plan, reader, direct=self._mapped and not reader.casts)
        return known[1]

    def _read(
        self, source: BlockSource, source_plan: _SourcePlan, blocks: SequenceBlocks, wait: Wait
    ) -> tuple[PeerConnection, _Fetched]:
        facts = Facts(source.epoch, self._fingerprint, source.num_blocks, source.fingerprint)
        while True:
            link, fresh = self._links.take(source, facts, wait)
            try:
                return link, self._copy(link.pipe, source_plan, blocks, wait)
            except PipeClosedError as error:
                self._links.drop(link)
                if fresh:
                    raise
                # The connection was an old one and may just have been idle for too long: once more on a new one.
                # As text: a handler that keeps the record would keep the exception's frames, and their memory.
                log.info(
                    "the %s pipe to %s was gone (%s): connecting again", link.pipe.kind, source.instance_id, str(error)
                )
            finally:
                self._links.give(link)

    def _copy(self, pipe: ReadPipe, source_plan: _SourcePlan, blocks: SequenceBlocks, wait: Wait) -> _Fetched:
        """Copy everything, or the layers as they are computed."""
        fetched, plan = _Fetched(np.ones(len(blocks), dtype=np.bool_)), source_plan.plan
        if blocks.ready is None:
            self._copy_parts(pipe, source_plan, parts_of(plan, blocks), fetched, wait)
            return fetched
        # What is staged is read group by group: a read that followed all layers would need room for all at once.
        if source_plan.direct and isinstance(pipe, FollowingReadPipe):
            parts = self._followed(pipe, plan, blocks, blocks.ready)
            if all(len(part.reads) <= part.reads.blocks_per_request for part in parts):
                self._follow(pipe, parts, fetched, wait)
                return fetched
        layers = _Layers(pipe, blocks.ready, self._group_of(pipe, len(blocks)), len(self._fingerprint.layer_shapes))
        while (some := layers.take(wait)) is not None:
            self._copy_parts(pipe, source_plan, parts_of(plan, blocks, some), fetched, wait)
        fetched.waited_s = layers.waited_s
        return fetched

    def _followed(self, pipe: ReadPipe, plan: ReshardPlan, blocks: SequenceBlocks, ready: int) -> list[Part]:
        """The reads that follow all layers."""
        count, group = len(self._fingerprint.layer_shapes), self._group_of(pipe, len(blocks))
        return list(followed_parts(plan, blocks, ready, [*range(group, count, group), count]))

    def _follow(self, pipe: FollowingReadPipe, parts: Sequence[Part], fetched: _Fetched, wait: Wait) -> None:
        """Have the source send the layers as it computes them."""
        reads = [LayerRead(part.reads, self._shards.arenas[part.target].blocks) for part in parts]
        start = time.perf_counter()
        valid, waited_s = pipe.follow(reads, wait)
        fetched.waited_s = min(waited_s, time.perf_counter() - start)  # the source says how long
        for part, each, good in zip(parts, reads, valid, strict=True):
            fetched.take(part, good, each.local.shape[1])

    def _group_of(self, pipe: ReadPipe, num_blocks: int) -> int:
        """Layers to read at once: several where one is small, yet a quarter at most, or nothing would overlap."""
        count = len(self._fingerprint.layer_shapes)
        layer_bytes = max(1, num_blocks * self._fingerprint.block_bytes // count)
        return max(1, min(count // 4, -(-pipe.group_bytes // layer_bytes)))

    def _copy_parts(
        self, pipe: ReadPipe, source_plan: _SourcePlan, parts: Iterable[Part], fetched: _Fetched, wait: Wait
    ) -> None:
        for part in parts:
            target = self._shards.arenas[part.target]
            if source_plan.direct:
                valid = pipe.read(part.reads, target.blocks, wait)
            else:
                cast = source_plan.reader.read(pipe, part.reads, target, wait)
                valid = cast.valid
                fetched.out_of_range.update(part.blocks[cast.out_of_range].tolist())
            fetched.take(part, valid, target.block_bytes)


@dataclass(frozen=True, eq=False, slots=True)
class _SourcePlan:
    """How one source's blocks become this instance's; ``direct``: pipes read into the arenas as they are."""

    plan: ReshardPlan
    reader: StagedReader
    direct: bool


@dataclass(eq=False, slots=True)
class _Fetched:
    """What a fetch has brought so far."""

    valid: Valid
    num_bytes: int = 0
    waited_s: float = 0.0
    out_of_range: set[int] = field(default_factory=set)
    """Blocks that have numbers out of range."""

    def take(self, part: Part, valid: Valid, block_bytes: int) -> None:
        """Note which blocks of a part are valid; ``block_bytes``: of whole blocks here."""
        good = int(np.count_nonzero(valid))
        if good < len(valid):
            self.valid[part.blocks] &= valid
        self.num_bytes += good * part.reads.bytes_per_block(block_bytes)


class _Layers:
    """Layers of a model, handed out in turn as the source computes them.

    Args:
        pipe: To the source.
        ready: Its progress before the first layer.
        group: Least layers to hand out at once.
        count: Of all layers.

    Attributes:
        waited_s: Seconds that passed in waiting for the source.
    """

    def __init__(self, pipe: ReadPipe, ready: int, group: int, count: int) -> None:
        self._pipe, self._ready, self._group, self._count = pipe, ready, group, count
        self._first = 0
        self.waited_s = 0.0

    def take(self, wait: Wait) -> range | None:
        """Wait for the next layers; ``None``: all have been taken.

        Raises:
            PipeClosedError, DeadlineError, CancelledError: As their names say.
        """
        if self._first >= self._count:
            return None
        start = time.perf_counter()
        wanted = min(self._first + self._group, self._count)
        done = self._pipe.wait_ready(self._ready + wanted, wait) - self._ready
        self.waited_s += time.perf_counter() - start
        layers = range(self._first, min(done, self._count))
        self._first = layers.stop
        return layers


def _check_range(blocks: SequenceBlocks, num_remote: int, num_local: int) -> None:
    """Refuse ids outside the two pools."""
    require_below(blocks.remote_ids, num_remote, "remote_ids")
    require_below(blocks.local_ids, num_local, "local_ids")
    if not blocks.paired and bounds(blocks.positions)[0] < 0:
        raise InvalidRequestError("positions must not be negative", field="positions")


async def _settled(future: asyncio.Future[FetchResult]) -> None:
    """Wait until a fetch has ended, however often this task is cancelled meanwhile."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()  # marks it as retrieved
