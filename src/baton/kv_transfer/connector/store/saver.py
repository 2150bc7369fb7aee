"""The saving half of the store connector: tells the store of blocks as they become complete, or a step earlier.

Early: before a step the store is told which blocks it is going to complete, and copies a layer while the next one is
computed. Nothing has to be said afterwards: the progress that the store follows says that a layer is there, and if the
step fails the blocks' generations are raised before the progress goes on, so that what was copied is not stored. What a
store does not take early, for whatever reason, it is told of once more when the step has ended.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.errors import BatonError, DeadlineError, QueueFullError
from baton.kv_cache.arena import Arena
from baton.kv_cache.connector import PlannedSave
from baton.kv_transfer.blocks import BlockSource
from baton.kv_transfer.connector.background import settle
from baton.kv_transfer.connector.breaker import CircuitBreaker
from baton.kv_transfer.connector.store.backend import ChainPart, FollowingBackend, StoreBackend, StoreOptions, StoreUse
from baton.types import BlockHash, BlockId, RequestId, Tenant

log = logging.getLogger(__name__)


def store_failed(breaker: CircuitBreaker, use: StoreUse, why: str) -> None:
    """Take note of a failure; the log gets one line when the store is left alone, however many follow."""
    if breaker.failed():
        log.warning("the KV store is left alone for a while: %s", why)
    use.times_left_alone = breaker.num_opened


def store_answered(breaker: CircuitBreaker) -> None:
    """Take note of an answer; the log gets one line when that ends an absence."""
    if breaker.succeeded():
        log.warning("the KV store answers again")


class StoreSaver:
    """Puts blocks, one call per request at a time and ``max_puts`` in all, and as many early.

    ``begins``, ``computed``, ``finished`` and ``releases`` are called in the engine's thread, everything else runs in
    the loop.
    """

    def __init__(
        self,
        options: StoreOptions,
        *,
        arena: Arena,
        client: StoreBackend,
        breaker: CircuitBreaker,
        use: StoreUse,
        spawn: Callable[[Callable[[], None]], None],
        wake: Callable[[], None],
        source: Callable[[], BlockSource],
    ) -> None:
        self._options, self._arena, self._client = options, arena, client
        self._follower = client if isinstance(client, FollowingBackend) else None
        self._breaker, self._use = breaker, use
        self._spawn, self._wake, self._source = spawn, wake, source
        self._lock = threading.Lock()
        self._saves: dict[RequestId, Save] = {}
        self._releases: deque[RequestId] = deque()
        self._turns, self._early_turns = asyncio.Semaphore(options.max_puts), asyncio.Semaphore(options.max_puts)
        self._computing: dict[RequestId, list[BlockId]] = {}  # blocks that the running step writes; engine's thread
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._owner: tuple[RequestId, Tenant] | None = None

    def belongs(self, request_id: RequestId, tenant: Tenant) -> None:
        """Take note of whose blocks :meth:`computed` tells of next."""
        self._owner = request_id, tenant

    def begins(
        self, saves: Sequence[PlannedSave], ready: int, stored: Mapping[RequestId, int], block_size: int
    ) -> None:
        """Tell the store of blocks that the next step is going to complete, if it can follow that.

        Args:
            saves: What the step computes.
            ready: The pool's progress before the step's first layer.
            stored: Leading blocks of requests that the store has.
            block_size: Tokens per block.
        """
        self._give_up_computing(list(self._computing))
        if self._follower is None:
            return
        for planned in saves:
            first = stored.get(planned.request_id, 0)
            with self._lock:
                save = self._saves.get(planned.request_id)
                if save is None and len(planned.hashes) > first:
                    save = self._open(planned.request_id, planned.tenant, planned.hashes[:first])
                if save is None or not self._add(save, planned.block_ids, planned.hashes):
                    continue
                save.num_computing = min(len(save.todo), len(planned.hashes) - planned.num_computed // block_size)
                save.ready, save.tried = ready, False
                blocks = planned.block_ids[planned.num_computed // block_size : len(planned.hashes)]
                self._computing[planned.request_id] = list(blocks)
                self._run_one(save)

    def computed(
        self, request_id: RequestId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash], num_stored: int = 0
    ) -> None:
        """Take note of a request's complete blocks and begin to save the new ones.

        Args:
            request_id: The request.
            block_ids: Its blocks, from its first token on.
            hashes: Of the complete ones.
            num_stored: Leading blocks that the store has, for this came from there.
        """
        owner, self._owner = self._owner, None
        tenant = owner[1] if owner is not None and owner[0] == request_id else None
        self._computing.pop(request_id, None)
        with self._lock:
            save = self._saves.get(request_id)
            if save is None:
                if len(hashes) <= num_stored:
                    return
                save = self._open(request_id, tenant, hashes[:num_stored])
                if save is None:
                    self._use.skipped_saves += 1
                    return
            save.num_computing = 0
            self._add(save, block_ids, hashes)
            self._run_one(save)

    def finished(self, request_id: RequestId) -> bool:
        """Whether an ended request's blocks have to be held until :meth:`releases` names it."""
        self._give_up_computing([request_id])
        with self._lock:
            save = self._saves.get(request_id)
            if save is None:
                return False
            if not save.running:
                del self._saves[request_id]
                return False
            save.ends_at = time.monotonic() + self._options.save_timeout_s
            return True

    def releases(self) -> list[RequestId]:
        """Return ended requests whose blocks need not be held any more."""
        with self._lock:
            released = list(self._releases)
            self._releases.clear()
        return released

    @property
    def pending(self) -> bool:
        """Whether blocks of ended requests are held or about to be given back."""
        with self._lock:
            return bool(self._releases) or any(save.ends_at is not None for save in self._saves.values())

    def close(self) -> None:
        """Stop saving and give every block back; any thread."""
        with self._lock:
            self._closed = True
            for save in list(self._saves.values()):
                save.given_up = True
                save.todo.clear()
                self._end(save)
        self._spawn(self._cancel)
        self._wake()

    async def wait_closed(self) -> None:
        """Wait until no task is left, after :meth:`close`."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _open(self, request_id: RequestId, tenant: Tenant | None, hashes: Sequence[BlockHash]) -> Save | None:
        """Begin to follow a request whose first blocks the store has, if there is room for it; lock held."""
        if self._closed or len(self._saves) >= self._options.max_saves or not self._breaker.allows():
            return None
        save = self._saves[request_id] = Save(request_id, tenant, tuple(hashes))
        return save

    def _add(self, save: Save, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash]) -> bool:
        """Take note of a request's blocks beyond those noted already; ``False``: there are none. Lock held."""
        first, hashes = len(save.hashes), tuple(hashes)
        if first >= len(hashes) or save.given_up:
            return False
        if save.hashes != hashes[:first]:  # another request of the same name, whose blocks are still on their way
            self._use.skipped_saves += 1
            return False
        save.hashes = hashes
        ids = list(block_ids[first : len(hashes)])
        save.todo.extend(zip(ids, self._arena.generations[ids].tolist(), strict=True))
        return True

    def _run_one(self, save: Save) -> None:
        """Have a task see to what is to be done; lock held."""
        if save.todo and not save.running and not save.given_up:
            save.running = True
            self._spawn(lambda: self._start(save))

    def _give_up_computing(self, request_ids: Sequence[RequestId]) -> None:
        """Of requests whose step has not said that it ended well: see to it that nothing of it is stored."""
        for request_id in request_ids:
            blocks = self._computing.pop(request_id, None)
            if blocks is None:
                continue
            self._arena.generations[blocks] += np.uint64(1)
            with self._lock:
                save = self._saves.get(request_id)
                if save is not None:
                    save.given_up = True
                    save.todo.clear()
                    self._spawn(functools.partial(self._unfollow, save))

    def _unfollow(self, save: Save) -> None:
        if save.following is not None:
            save.following.cancel()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _start(self, save: Save) -> None:
        task = asyncio.get_running_loop().create_task(self._run(save), name=f"save {save.request_id}")
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, save))

    def _ended(self, task: asyncio.Task[None], save: Save) -> None:
        """Whatever a task ended with, its blocks go back: a done callback also runs for one that never began."""
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
            if error is None:
                return  # it said so itself; who is running by now is the next one, begun in the meantime
            log.error(
                "saving blocks of %s failed", save.request_id, exc_info=error, extra={"request_id": save.request_id}
            )
        with self._lock:
            if not save.running:
                return
            save.given_up = True
            save.todo.clear()
            self._end(save)
        self._wake()

    async def _run(self, save: Save) -> None:
        while True:
            with self._lock:
                batch = self._next(save)
                if batch is None:
                    held = save.ends_at is not None
                    self._end(save)
                    break
            if batch.ready is not None:
                await self._follow(save, batch, batch.ready)
            elif not await self._put(save, batch):
                with self._lock:
                    save.given_up = True
                    save.todo.clear()
        if held:
            self._wake()

    def _next(self, save: Save) -> Batch | None:
        """Return what is to be put next: blocks that are complete, else those that are being computed. Lock held."""
        if save.given_up:
            return None
        complete = len(save.todo) - save.num_computing
        early = not complete and not save.tried
        count = min(len(save.todo) if early else complete, self._options.blocks_per_call)
        if not count:
            return None
        start = len(save.hashes) - len(save.todo)
        part = ChainPart(save.hashes, start, start + count, save.tenant)
        deadline = min(time.monotonic() + self._options.save_timeout_s, save.ends_at or float("inf"))
        if early:  # they stay to be done until the store has them
            save.tried = True
            return Batch(part, list(itertools.islice(save.todo, count)), save.ready, deadline)
        return Batch(part, [save.todo.popleft() for _ in range(count)], None, deadline)

    async def _follow(self, save: Save, batch: Batch, ready: int) -> None:
        """Let the store take blocks while they are computed; what it does not take it is told of again later."""
        client, part, deadline = self._follower, batch.part, batch.deadline
        if client is None or self._early_turns.locked():
            return
        async with self._early_turns:
            if save.given_up:
                return
            work = client.save(self._source(), part, batch.ids, batch.generations, deadline=deadline, ready=ready)
            call = save.following = asyncio.ensure_future(work)
            try:
                await asyncio.wait([call])
            finally:
                save.following = None
                call.cancel()
                await settle([call])
        if call.cancelled():
            return
        if (error := call.exception()) is not None:
            if not isinstance(error, BatonError):
                raise error
            log.debug(
                "%d blocks of %s were not saved early: %s",
                *(len(part), save.request_id, error.message),
                extra={"request_id": save.request_id},
            )
            return
        held, num_bytes = call.result()
        self._use.saved_bytes += num_bytes
        if held < len(part):
            return
        store_answered(self._breaker)
        self._use.saves += 1
        self._use.saved_blocks += held
        self._use.followed_blocks += held
        with self._lock:
            if not save.given_up:
                for _ in range(len(part)):
                    save.todo.popleft()
                save.num_computing = min(save.num_computing, len(save.todo))

    async def _put(self, save: Save, batch: Batch) -> bool:
        part, deadline = batch.part, batch.deadline
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._turns.acquire()
        except TimeoutError:
            return self._not_saved(save, part, DeadlineError("no turn in time"))
        try:
            held, num_bytes = await self._client.save(
                self._source(), part, batch.ids, batch.generations, deadline=deadline
            )
        except BatonError as error:
            if not isinstance(error, QueueFullError):
                store_failed(self._breaker, self._use, error.message)
            return self._not_saved(save, part, error)
        finally:
            self._turns.release()
        store_answered(self._breaker)
        self._use.saves += 1
        self._use.saved_blocks += held
        self._use.saved_bytes += num_bytes
        return True

    def _not_saved(self, save: Save, part: ChainPart, error: BatonError) -> bool:
        self._use.save_failures += 1
        log.debug(
            "%d blocks of %s were not saved: %s",
            *(len(part), save.request_id, error.message),
            extra={"request_id": save.request_id},
        )
        return False

    def _end(self, save: Save) -> None:
        """No task works on a save any more; lock held. A request that has ended gets its blocks back."""
        save.running = False
        if save.ends_at is not None and self._saves.get(save.request_id) is save:
            del self._saves[save.request_id]
            self._releases.append(save.request_id)


Item = tuple[BlockId, int]
"""Block id, generation."""


@dataclass(eq=False)
class Save:
    """One request's blocks on their way to the store; guarded by the saver's lock.

    Attributes:
        hashes: Of the leading blocks that were taken note of.
        todo: The last of these, not put yet.
        num_computing: The last of those again, which a step is about to complete.
        ready: The pool's progress before that step.
        tried: Whether the store was told of them early.
        following: The call that told it, while it lasts.
        running: Whether a task works on it.
        given_up: Nothing more of this request is saved.
        ends_at: Once the request has ended: ``time.monotonic()`` when its blocks are given back at the latest.
    """

    request_id: RequestId
    tenant: Tenant | None = None
    hashes: Sequence[BlockHash] = ()
    todo: deque[Item] = field(default_factory=deque)
    num_computing: int = 0
    ready: int = 0
    tried: bool = False
    following: asyncio.Task[tuple[int, int]] | None = None
    running: bool = False
    given_up: bool = False
    ends_at: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """What one call puts.

    Attributes:
        items: Parallel to the part.
        ready: As ``Save.ready`` where a step still computes them; ``None``: they are complete.
        deadline: ``time.monotonic()`` seconds.
    """

    part: ChainPart
    items: list[Item]
    ready: int | None
    deadline: float

    @property
    def ids(self) -> list[BlockId]:
        """The blocks."""
        return [block_id for block_id, _ in self.items]

    @property
    def generations(self) -> list[int]:
        """Parallel to :attr:`ids`."""
        return [generation for _, generation in self.items]
