"""The saving half of the store connector: tells the store of blocks as they become complete."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.errors import BatonError, DeadlineError, QueueFullError
from baton.kv.arena import KVArena
from baton.transport.blocks import BlockSource
from baton.transport.connector.breaker import CircuitBreaker
from baton.transport.connector.store_backend import ChainPart, StoreBackend
from baton.transport.connector.store_use import StoreOptions, StoreUse
from baton.types import BlockHash, BlockId, RequestId, Tenant

log = logging.getLogger(__name__)

_Item = tuple[BlockId, int]
"""Block id, generation."""


@dataclass(eq=False)
class _Save:
    """One request's blocks on their way to the store; guarded by the saver's lock.

    Attributes:
        hashes: Of the leading blocks that were taken note of.
        todo: The last of these, not put yet.
        running: Whether a task works on it.
        given_up: Nothing more of this request is saved.
        ends_at: Once the request has ended: ``time.monotonic()`` when its blocks are given back at the latest.
    """

    request_id: RequestId
    tenant: Tenant | None = None
    hashes: Sequence[BlockHash] = ()
    todo: deque[_Item] = field(default_factory=deque)
    running: bool = False
    given_up: bool = False
    ends_at: float | None = None


class StoreSaver:
    """Puts blocks, one call per request at a time and ``max_puts`` in all.

    ``computed``, ``finished`` and ``releases`` are called in the engine's thread, everything else runs in the loop.
    """

    def __init__(
        self,
        options: StoreOptions,
        *,
        arena: KVArena,
        client: StoreBackend,
        breaker: CircuitBreaker,
        use: StoreUse,
        spawn: Callable[[Callable[[], None]], None],
        wake: Callable[[], None],
        source: Callable[[], BlockSource],
    ) -> None:
        self._options, self._arena, self._client = options, arena, client
        self._breaker, self._use = breaker, use
        self._spawn, self._wake, self._source = spawn, wake, source
        self._lock = threading.Lock()
        self._saves: dict[RequestId, _Save] = {}
        self._releases: deque[RequestId] = deque()
        self._turns = asyncio.Semaphore(options.max_puts)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._owner: tuple[RequestId, Tenant] | None = None

    def belongs(self, request_id: RequestId, tenant: Tenant) -> None:
        """Take note of whose blocks :meth:`computed` tells of next."""
        self._owner = request_id, tenant

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
        hashes = tuple(hashes)
        owner, self._owner = self._owner, None
        tenant = owner[1] if owner is not None and owner[0] == request_id else None
        with self._lock:
            save = self._saves.get(request_id)
            if save is None:
                if len(hashes) <= num_stored:
                    return
                if self._closed or len(self._saves) >= self._options.max_saves or not self._breaker.allows():
                    self._use.skipped_saves += 1
                    return
                save = self._saves[request_id] = _Save(request_id, tenant, hashes[:num_stored])
            first = len(save.hashes)
            if first >= len(hashes) or save.given_up:
                return
            if save.hashes != hashes[:first]:  # another request of the same name, whose blocks are still on their way
                self._use.skipped_saves += 1
                return
            save.hashes = hashes
            ids = list(block_ids[first : len(hashes)])
            generations = self._arena.generations[ids].tolist()
            save.todo.extend(zip(ids, generations, strict=True))
            if save.running:
                return
            save.running = True
        self._spawn(lambda: self._start(save))

    def finished(self, request_id: RequestId) -> bool:
        """Whether an ended request's blocks have to be held until :meth:`releases` names it."""
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

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _start(self, save: _Save) -> None:
        task = asyncio.get_running_loop().create_task(self._run(save), name=f"save {save.request_id}")
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, save))

    def _ended(self, task: asyncio.Task[None], save: _Save) -> None:
        """Whatever a task ended with, its blocks go back: a done callback also runs for one that never began."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("saving blocks of %s failed", save.request_id, exc_info=error)
        with self._lock:
            if not save.running:
                return
            save.given_up = True
            save.todo.clear()
            self._end(save)
        self._wake()

    async def _run(self, save: _Save) -> None:
        while True:
            with self._lock:
                count = min(len(save.todo), self._options.blocks_per_call)
                start = len(save.hashes) - len(save.todo)
                part = ChainPart(save.hashes, start, start + count, save.tenant)
                batch = [save.todo.popleft() for _ in range(count)]
                if not batch:
                    held = save.ends_at is not None
                    self._end(save)
                    break
                deadline = min(time.monotonic() + self._options.save_timeout_s, save.ends_at or float("inf"))
            if not await self._put(save, part, batch, deadline):
                with self._lock:
                    save.given_up = True
                    save.todo.clear()
        if held:
            self._wake()

    async def _put(self, save: _Save, part: ChainPart, batch: list[_Item], deadline: float) -> bool:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._turns.acquire()
        except TimeoutError:
            return self._not_saved(save, part, DeadlineError("no turn in time"))
        block_ids, generations = zip(*batch, strict=True)
        try:
            held, num_bytes = await self._client.save(self._source(), part, block_ids, generations, deadline=deadline)
        except BatonError as error:
            if not isinstance(error, QueueFullError):
                self._breaker.failed()
                self._use.times_left_alone = self._breaker.num_opened
            return self._not_saved(save, part, error)
        finally:
            self._turns.release()
        self._breaker.succeeded()
        self._use.saves += 1
        self._use.saved_blocks += held
        self._use.saved_bytes += num_bytes
        return True

    def _not_saved(self, save: _Save, part: ChainPart, error: BatonError) -> bool:
        self._use.save_failures += 1
        level = logging.INFO if isinstance(error, QueueFullError) else logging.WARNING
        log.log(level, "%d blocks of %s were not saved: %s", len(part), save.request_id, error.message)
        return False

    def _end(self, save: _Save) -> None:
        """No task works on a save any more; lock held. A request that has ended gets its blocks back."""
        save.running = False
        if save.ends_at is not None and self._saves.get(save.request_id) is save:
            del self._saves[save.request_id]
            self._releases.append(save.request_id)
