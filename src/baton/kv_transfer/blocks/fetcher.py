"""Copies other instances' blocks into this instance's arenas."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.background import BackgroundThread
from baton.errors import (
    BatonError,
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
from baton.kv_transfer.blocks.lanes import Job, Lane, ProgressWait, Steps
from baton.kv_transfer.blocks.plan import Part, SequenceBlocks, followed_parts, parts_of
from baton.kv_transfer.blocks.rests import PipeRests
from baton.kv_transfer.blocks.server import check_shards
from baton.kv_transfer.blocks.staging import StagedReader, Staging
from baton.kv_transfer.pipes.base import FollowingReadPipe, LayerRead, PipeOptions, ReadPipe
from baton.kv_transfer.pipes.registry import load_kind, resolve_kinds
from baton.kv_transfer.streams import EitherFlag, Flag, PipeStalledError, StallLimit, Wait
from baton.kv_transfer.types import BlockSource, FetchResult, Valid, bounds, require_below
from baton.kv_transfer.wire import Facts

log = logging.getLogger(__name__)
MAX_LINKS = 256
_Key = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class LinkOptions(PipeOptions):
    """Options of the connections to sources.

    Attributes:
        idle_s: Seconds after which an unused connection is closed.
        stall_s: Seconds without a byte after which a read ends, if its source could send.
    """

    idle_s: float = 60.0
    stall_s: float = 3.0


class PipeDialer:
    """Opens read pipes: the first kind in the order of preference that reaches the source and does not rest.

    Attributes:
        rests: Pipes that are left alone.

    Raises:
        ConfigError: A kind cannot work here; says why.
    """

    def __init__(self, kinds: Sequence[str], options: PipeOptions) -> None:
        self.rests = PipeRests()
        wanted = [kind for kind in kinds if kind != "memory" or options.memory is not None]
        self._kinds = {kind: load_kind(kind)(options) for kind in wanted}

    def close(self) -> None:
        """End what the pipes share; they are closed before."""
        for kind in self._kinds.values():
            kind.close()

    def connect(self, source: BlockSource, facts: Facts, wait: Wait) -> tuple[ReadPipe, str]:
        """Return a pipe, and why it is not of a kind preferred over it (empty: it is the first choice).

        Raises:
            PipeClosedError: No kind reaches the source.
            BatonError: The source was reached and refused; then no other kind is tried.
        """
        addresses = {endpoint.kind: endpoint.address for endpoint in source.endpoints}
        reasons: list[str] = []
        for name, kind in self._kinds.items():
            if self.rests.is_resting(source.instance_id, name):
                reasons.append(f"{name}: left alone, since nothing came over it")
                continue
            if name not in addresses:
                if name != "memory":
                    reasons.append(f"{name}: not offered")
                continue
            try:
                wait.record_progress()
                pipe = kind.connect(addresses[name], facts, wait)
            except PipeStalledError as error:
                self.rests.record_stall(source.instance_id, name)
                reasons.append(f"{name}: {error}")
                continue
            except (PipeClosedError, ConfigError) as error:  # not there, or a pipe that cannot work on this machine
                reasons.append(f"{name}: {error}")
                continue
            if reasons:
                log.warning("%s is reached over %s (%s)", source.instance_id, name, "; ".join(reasons))
            return pipe, "; ".join(reasons)
        raise PipeClosedError(f"no pipe reaches {source.instance_id}: {'; '.join(reasons) or 'no kind in common'}")

    def kinds_to(self, source: BlockSource) -> list[str]:
        """Return the kinds of pipe that this side and a source have in common."""
        return [endpoint.kind for endpoint in source.endpoints if endpoint.kind in self._kinds]


@dataclass(eq=False, slots=True)
class PeerConnection:
    """An open pipe to a source. ``users`` counts reads under way."""

    key: _Key
    pipe: ReadPipe
    facts: Facts
    fallback_reason: str
    users: int = 0
    last_used: float = field(default_factory=time.monotonic)


class LinkCache:
    """Keeps one link per source and epoch; closes those unused for ``idle_s`` seconds."""

    def __init__(self, dialer: PipeDialer, *, idle_s: float) -> None:
        self._dialer = dialer
        self._idle_s = idle_s
        self._changed = threading.Condition()
        self._links: dict[_Key, PeerConnection] = {}
        self._connecting: set[_Key] = set()
        self._closed = False
        self._reaper: threading.Thread | None = None

    def acquire(self, source: BlockSource, facts: Facts, wait: Wait) -> tuple[PeerConnection, bool]:
        """Return a link for one read, and whether it was made for it; :meth:`release` it.

        Raises:
            PipeClosedError: Nothing reaches the source.
            QueueFullError: ``MAX_LINKS`` sources are being read from right now.
            FingerprintMismatchError, StaleBlockError, UnauthenticatedError: The source refused.
            DeadlineError, CancelledError: As their names say.
        """
        key = (source.instance_id, bytes(source.epoch))
        with self._changed:
            while True:
                if self._closed:
                    raise PipeClosedError("the fetcher was closed")
                link = self._links.get(key)
                if link is not None and link.pipe.alive():
                    return self._use(link, facts), False
                if link is not None:
                    self._forget(link)
                if key not in self._connecting:
                    break
                wait.check(f"connecting to {source.instance_id}")
                self._changed.wait(wait.nap())
            self._make_room()
            self._connecting.add(key)
        return self._connect(key, source, facts, wait), True

    def release(self, link: PeerConnection) -> None:
        """End one read over a link."""
        with self._changed:
            link.users -= 1
            link.last_used = time.monotonic()

    def drop(self, link: PeerConnection) -> None:
        """Close a link that failed."""
        with self._changed:
            self._forget(link)

    def close(self) -> None:
        """Close all links; reads under way fail."""
        with self._changed:
            self._closed = True
            for link in list(self._links.values()):
                self._forget(link)
            self._changed.notify_all()
            reaper = self._reaper
        if reaper is not None:
            reaper.join()
        self._dialer.close()

    def __len__(self) -> int:
        return len(self._links)

    def _use(self, link: PeerConnection, facts: Facts) -> PeerConnection:
        if link.facts != facts:
            # The ids were checked against what the caller says of the source, which is not what the source said.
            raise FingerprintMismatchError("the source was described otherwise before", field="num_blocks")
        link.users += 1
        return link

    def _connect(self, key: _Key, source: BlockSource, facts: Facts, wait: Wait) -> PeerConnection:
        pipe: ReadPipe | None = None
        try:
            pipe, reason = self._dialer.connect(source, facts, wait)
        finally:
            with self._changed:
                self._connecting.discard(key)
                closed = self._closed
                if pipe is not None and not closed:
                    for old in [other for other in self._links.values() if other.key[0] == key[0] and not other.users]:
                        self._forget(old)  # an epoch that is over
                    link = self._links[key] = PeerConnection(key, pipe, facts, reason, users=1)
                    self._start_reaper()
                self._changed.notify_all()
        if closed:
            pipe.close()
            raise PipeClosedError("the fetcher was closed")
        return link

    def _make_room(self) -> None:
        if len(self._links) + len(self._connecting) < MAX_LINKS:
            return
        unused = [link for link in self._links.values() if not link.users]
        if not unused:
            raise QueueFullError(f"{MAX_LINKS} sources are being read from", retry_after_s=1.0)
        self._forget(min(unused, key=lambda link: link.last_used))

    def _forget(self, link: PeerConnection) -> None:
        if self._links.get(link.key) is link:
            del self._links[link.key]
        link.pipe.close()

    def _start_reaper(self) -> None:
        if self._reaper is None:
            self._reaper = BackgroundThread("baton-fetch-idle", self._reap, is_closing=lambda: self._closed)
            self._reaper.start()

    def _reap(self) -> None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                for link in [link for link in self._links.values() if not link.users]:
                    if now - link.last_used >= self._idle_s:
                        self._forget(link)
                ends = [link.last_used + self._idle_s - now for link in self._links.values() if not link.users]
                # Links in use are looked at again later: to wake this thread with every read would cost more than that.
                self._changed.wait(min(ends, default=self._idle_s))


class BlockFetcher:
    """Fetches blocks over the best pipe that reaches their source; thread safe.

    Connections are kept per source and epoch, dropped on errors and when idle.

    Args:
        pool: Target of all copies: the arenas of all ranks, or the only arena.
        fingerprint: Fingerprint of the pool's blocks. A source's KV must be the same, perhaps divided in another way;
            with ``kv_cast``, KV of another dtype is converted.
        kinds: Kinds of pipe in order of preference; ``"auto"``: see :func:`resolve_kinds`.
        max_threads: Number of fetches of :meth:`fetch_async` that copy at once from one source, at least 1.
        links: Options of the connections to sources.

    Attributes:
        pool: Arenas that all copies go to.
        rests: Pipes that are left alone because nothing came over them.
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
        self.pool = pool if isinstance(pool, KVShards) else KVShards((pool,))
        options = dataclasses.replace(links or LinkOptions(), arena=self.pool.primary)
        wanted = resolve_kinds(kinds, options)
        for name, value in (("max_threads", max_threads), ("streams", options.tcp.streams)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", field=name)
        check_shards(fingerprint, self.pool)
        self._fingerprint = fingerprint
        self._plan: tuple[Fingerprint, _SourcePlan] | None = None  # of the latest source; most are alike
        self._staging = Staging()
        self._device_staging = Staging()
        self._mapped = all(arena.mapped for arena in self.pool.arenas)
        self._dialer = PipeDialer(wanted, options)
        self.rests = self._dialer.rests
        self._stall_s = options.stall_s
        self._links = LinkCache(self._dialer, idle_s=options.idle_s)
        self._closing = threading.Event()
        self._max_threads = max_threads
        self._lanes_lock = threading.Lock()
        self._lanes: dict[tuple[str, bytes], Lane] = {}

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
            source: Instance that owns the blocks.
            remote_ids: Blocks in the source's arenas, [n].
            generations: Generations of the blocks when they were offered, [n].
            local_ids: Blocks to fill, all different, [n].
            deadline: Time limit, in seconds of ``time.monotonic()``.
            cancelled: Ends the fetch when another thread sets it.

        Raises:
            FingerprintMismatchError: Also if the source's blocks have another size.
            BatonError: As :meth:`fetch_sequence`.
        """
        blocks = SequenceBlocks.pairs(remote_ids, generations, local_ids)
        if source.fingerprint.block_size != self._fingerprint.block_size:
            raise FingerprintMismatchError("blocks of another size than this arena's", field="block_size")
        return self.fetch_sequence(source, blocks, deadline=deadline, cancelled=cancelled)

    def fetch_sequence(
        self, source: BlockSource, blocks: SequenceBlocks, *, deadline: float, cancelled: Flag | None = None
    ) -> FetchResult:
        """Copy blocks of a sequence, whatever both sides' parallel shapes; blocks the calling thread.

        On return nothing writes into the local blocks any more.

        Args:
            source: Instance that owns the blocks.
            blocks: Blocks to copy and their targets; with ``ready``, layer by layer as they are computed.
            deadline: Time limit, in seconds of ``time.monotonic()``.
            cancelled: Ends the fetch when another thread sets it.

        Returns:
            Result per block of the source; blocks that are not ``valid`` must not be used.

        Raises:
            InvalidRequestError: Ids out of range or of different numbers.
            FingerprintMismatchError: The source's KV differs; names the field.
            StaleBlockError: The source was restarted.
            UnauthenticatedError: The tokens differ.
            PipeClosedError: No pipe reaches the source, or it went away meanwhile.
            DeadlineError, CancelledError: As their names say.
        """
        stall = self.stall_limit(source_ready=blocks.ready is None)
        steps = self._steps(source, blocks, Wait(deadline, EitherFlag(cancelled, self._closing), stall))
        try:
            asked = next(steps)
            while True:
                try:
                    progress = 0 if asked is None else asked.pipe.wait_ready(asked.value, asked.wait)
                except BatonError as error:
                    asked = steps.throw(error)
                else:
                    asked = steps.send(progress)
        except StopIteration as end:
            result: FetchResult = end.value
            return result

    async def fetch_async(
        self,
        source: BlockSource,
        blocks: SequenceBlocks,
        *,
        deadline: float,
        cancelled: threading.Event | None = None,
        stall: StallLimit | None = None,
    ) -> FetchResult:
        """Run :meth:`fetch_sequence` in the source's threads; waiting for the source's computation occupies none.

        ``stall`` is the read's own limit of silence, for a caller who learns when the source can send.

        If the task is cancelled, this still returns only once nothing writes into the local blocks any more; it sets
        ``cancelled``.

        Raises:
            QueueFullError: Too many fetches from that source wait.
        """
        flag = cancelled or threading.Event()
        stall = stall or self.stall_limit(source_ready=blocks.ready is None)
        wait = Wait(deadline, EitherFlag(flag, self._closing), stall)
        lane, job = self._submit(source, self._steps(source, blocks, wait), wait)
        future = asyncio.wrap_future(job.future)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            flag.set()
            if not lane.withdraw(job):
                await settle([future])
            raise

    def stall_limit(self, *, source_ready: bool) -> StallLimit:
        """Return a new limit of silence, for one read."""
        return StallLimit(self._stall_s, source_ready=source_ready)

    def is_resting(self, source: BlockSource) -> bool:
        """Whether all pipes to a source are left alone now, so that no read could begin."""
        kinds = self._dialer.kinds_to(source)
        return bool(kinds) and all(self.rests.is_resting(source.instance_id, kind) for kind in kinds)

    def admits(self, source: BlockSource) -> bool:
        """Whether a caller may read from a source; while its pipes may be tried again, only one caller may."""
        return any([self.rests.admits(source.instance_id, kind) for kind in self._dialer.kinds_to(source)] or [True])

    def lanes(self) -> list[Lane]:
        """Return the sources that :meth:`fetch_async` has threads for."""
        with self._lanes_lock:
            return list(self._lanes.values())

    def num_threads(self) -> int:
        """Return the number of threads of :meth:`fetch_async`, for all sources."""
        return sum(lane.num_threads for lane in self.lanes())

    def close(self) -> None:
        """Close all connections; fetches under way fail. Returns when their threads have ended."""
        self._closing.set()
        self._links.close()
        for lane in self.lanes():
            lane.close()

    def _submit(self, source: BlockSource, steps: Steps, wait: Wait) -> tuple[Lane, Job]:
        key = source.instance_id, bytes(source.epoch)
        with self._lanes_lock:
            if self._closing.is_set():
                raise PipeClosedError("the fetcher was closed")
            lane = self._lanes.get(key)
            if lane is None:
                self._lanes = {known: other for known, other in self._lanes.items() if not other.unused}
                lane = self._lanes[key] = Lane(source.instance_id, self._max_threads)
            return lane, lane.submit(steps, wait)

    def _steps(self, source: BlockSource, blocks: SequenceBlocks, wait: Wait) -> Steps:
        """Fetch step by step; see :meth:`fetch_sequence`."""
        start = time.perf_counter()
        _check_range(blocks, source.num_blocks, self.pool.primary.num_blocks)
        source_plan = self._plan_for(source.fingerprint)
        if self._closing.is_set():
            raise PipeClosedError("the fetcher was closed")
        wait.record_progress()  # it may have waited for a thread
        wait.check("starting a fetch")
        if len(blocks) == 0:
            return FetchResult("", 0, time.perf_counter() - start, np.zeros(0, dtype=np.bool_))
        try:
            link, fetched = yield from self._read(source, source_plan, blocks, wait)
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

    def _plan_for(self, source: Fingerprint) -> _SourcePlan:
        known = self._plan
        if known is None or (known[0] is not source and known[0] != source):
            plan = self._fingerprint.plan_from(source)
            reader = StagedReader(source, self._fingerprint, self._staging, self._device_staging)
            known = self._plan = source, _SourcePlan(plan, reader, direct=self._mapped and not reader.casts)
        return known[1]

    def _read(
        self, source: BlockSource, source_plan: _SourcePlan, blocks: SequenceBlocks, wait: Wait
    ) -> Generator[ProgressWait | None, int, tuple[PeerConnection, _Fetched]]:
        facts = Facts(source.epoch, self._fingerprint, source.num_blocks, source.fingerprint)
        while True:
            link, fresh = self._links.acquire(source, facts, wait)
            try:
                yield None
                fetched = yield from self._copy(link.pipe, source_plan, blocks, wait)
                self.rests.record_success(source.instance_id, link.pipe.kind)
                return link, fetched
            except PipeStalledError:
                self._links.drop(link)
                self.rests.record_stall(source.instance_id, link.pipe.kind)  # on over another kind, if there is one
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
                self._links.release(link)

    def _copy(
        self, pipe: ReadPipe, source_plan: _SourcePlan, blocks: SequenceBlocks, wait: Wait
    ) -> Generator[ProgressWait | None, int, _Fetched]:
        """Copy everything, or the layers as they are computed."""
        fetched = _Fetched(np.ones(len(blocks), dtype=np.bool_))
        plan = source_plan.plan
        if blocks.ready is None:
            self._copy_parts(pipe, source_plan, parts_of(plan, blocks), fetched, wait)
            return fetched
        count = plan.num_layers
        group = self._group_of(pipe, len(blocks))
        # What is staged is read group by group: a read that followed all layers would need room for all at once.
        if source_plan.direct and isinstance(pipe, FollowingReadPipe):
            parts = list(followed_parts(plan, blocks, blocks.ready, [*range(group, count, group), count]))
            if all(len(part.reads) <= part.reads.blocks_per_request for part in parts):
                # From its first layer on a step goes on by itself: until then no thread and no connection is held.
                yield from _await_progress(pipe, blocks.ready + 1, fetched, wait)
                self._follow(pipe, parts, fetched, wait)
                return fetched
        done = 0
        while done < count:
            wanted = min(done + group, count)
            now = yield from _await_progress(pipe, blocks.ready + wanted, fetched, wait)
            some = range(done, min(now - blocks.ready, count))
            self._copy_parts(pipe, source_plan, parts_of(plan, blocks, some), fetched, wait)
            done = some.stop
        return fetched

    def _follow(self, pipe: FollowingReadPipe, parts: Sequence[Part], fetched: _Fetched, wait: Wait) -> None:
        """Have the source send the layers as it computes them."""
        reads = [LayerRead(part.reads, self.pool.arenas[part.target].blocks) for part in parts]
        start = time.perf_counter()
        valid, waited_s = pipe.follow(reads, wait)
        fetched.waited_s += min(waited_s, time.perf_counter() - start)  # the source says how long
        for part, each, good in zip(parts, reads, valid, strict=True):
            fetched.add_part(part, good, each.local.shape[1])

    def _group_of(self, pipe: ReadPipe, num_blocks: int) -> int:
        """Layers to read at once: several where one is small, yet a quarter at most, or nothing would overlap."""
        count = len(self._fingerprint.layer_shapes)
        layer_bytes = max(1, num_blocks * self._fingerprint.block_bytes // count)
        return max(1, min(count // 4, -(-pipe.group_bytes // layer_bytes)))

    def _copy_parts(
        self, pipe: ReadPipe, source_plan: _SourcePlan, parts: Iterable[Part], fetched: _Fetched, wait: Wait
    ) -> None:
        for part in parts:
            target = self.pool.arenas[part.target]
            if source_plan.direct:
                valid = pipe.read(part.reads, target.blocks, wait)
            else:
                cast = source_plan.reader.read(pipe, part.reads, target, wait)
                valid = cast.valid
                fetched.out_of_range.update(part.blocks[cast.out_of_range].tolist())
            fetched.add_part(part, valid, target.block_bytes)
            wait.record_progress()


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
    """Indexes of blocks with numbers out of the local dtype's range."""

    def add_part(self, part: Part, valid: Valid, block_bytes: int) -> None:
        """Add the result of a part's read; ``block_bytes``: size of a local block."""
        good = int(np.count_nonzero(valid))
        if good < len(valid):
            self.valid[part.blocks] &= valid
        self.num_bytes += good * part.reads.bytes_per_block(block_bytes)


def _await_progress(
    pipe: ReadPipe, value: int, fetched: _Fetched, wait: Wait
) -> Generator[ProgressWait | None, int, int]:
    """Wait for the source's computation; returns how far it is.

    Raises:
        PipeClosedError, DeadlineError, CancelledError: As their names say.
    """
    start = time.perf_counter()
    now = yield ProgressWait(pipe, value, wait)
    fetched.waited_s += time.perf_counter() - start
    wait.record_progress()
    wait.check("waiting for the computation")
    return now


def _check_range(blocks: SequenceBlocks, num_remote: int, num_local: int) -> None:
    """Refuse ids outside the two pools."""
    require_below(blocks.remote_ids, num_remote, "remote_ids")
    local = blocks.local_ids.reshape(-1)
    require_below(local[local >= 0] if len(blocks.local_ids) > 1 else local, num_local, "local_ids")
    if not blocks.paired and bounds(blocks.positions)[0] < 0:
        raise InvalidRequestError("positions must not be negative", field="positions")


async def settle(futures: Iterable[asyncio.Future[Any]]) -> None:
    """Wait until all have ended, whatever with, however often this task is cancelled meanwhile."""
    for future in futures:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue
        if not future.cancelled():
            future.exception()  # retrieved: the caller that waited reports it
