"""Holds offers (or KV) until the right consumer asks: matched by key or by tokens, not by order of arrival.

A pipe is a FIFO and requests are not: the consumer of the second message may ask first. Hence this buffer, bounded in
bytes and entries. It cannot deadlock: a query sees also the entries whose inserters still wait for room, an insert
that can never fit is an error at once, and every wait has a deadline. Room is made by consumers, by ``withdraw`` and,
when an insert needs it, by dropping entries whose lease has ended unclaimed; as every lease ends, so does every wait
for room.

One lock, held for dictionary operations only (see ``lookup_state``). Waiting calls are woken one by one, through an
event or through their event loop, so that a waiting coroutine takes no thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import numpy.typing as npt

from baton.errors import CancelledError, DeadlineError, InvalidRequestError
from baton.kv_transfer.lookup_buffer.index import region, token_array
from baton.kv_transfer.lookup_buffer.state import Entry, LookupState, Waiter, Wake
from baton.kv_transfer.protocol.deadline import TICK_S, Flag
from baton.types import RequestId

log = logging.getLogger(__name__)
V = TypeVar("V")


class LookupBuffer(Generic[V]):
    """A bounded meeting place of producers and consumers; thread safe, and usable from any event loop.

    An entry holds the KV of ``tokens[roi]``, which depends on all of ``tokens[:roi.stop]``. A query names either a key,
    or the tokens of a consumer; then an entry matches if everything up to its end is what the consumer has, too.

    Args:
        max_bytes: Bound on the sum of the stored entries' ``nbytes``.
        max_entries: Bound on their number.
        max_waiting: Bound on calls that wait at once, inserts and queries each.
        on_drop: Told (key, value) of entries nobody will get any more: those dropped for room after their lease, those
            left at ``close``, those whose consumer left with no room to take them back. Called without any lock held.
        clock: Seconds, as ``time.monotonic``; deadlines and leases are read on it.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        max_entries: int = 65_536,
        max_waiting: int = 65_536,
        on_drop: Callable[[RequestId, V], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_entries", max_entries), ("max_waiting", max_waiting)):
            if value < 1:
                raise InvalidRequestError(f"{name} must be at least 1, got {value}", field=name)
        self._state: LookupState[V] = LookupState(max_bytes, max_entries, max_waiting, clock)
        self._lock = threading.Lock()
        self._on_drop, self._clock = on_drop, clock

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored entries."""
        return self._state.num_bytes

    @property
    def num_waiting(self) -> int:
        """Calls that wait: queries, and inserts for room."""
        with self._lock:
            return len(self._state.waiters) + len(self._state.pending)

    def __len__(self) -> int:
        """Stored entries."""
        return len(self._state.stored)

    def insert(
        self,
        key: RequestId,
        tokens: npt.ArrayLike,
        roi: slice | None,
        value: V,
        nbytes: int,
        *,
        lease_s: float,
        deadline: float | None = None,
        cancelled: Flag | None = None,
    ) -> None:
        """Put an entry in, waiting for room if there is a deadline.

        Args:
            key: Whose it is; several entries may have the same, and are then taken in order.
            tokens: From the start of the sequence; must not change afterwards.
            roi: Which of the tokens' KV this is; ``None``: all.
            value: What the consumer gets.
            nbytes: Its size, towards the bound.
            lease_s: Seconds after which it may be dropped for room.
            deadline: Seconds on the buffer's clock; ``None``: don't wait.
            cancelled: Set by another thread to give up.

        Raises:
            InvalidRequestError: It can never fit, or ``tokens`` or ``roi`` are wrong.
            QueueFullError: There is no room and no deadline, or too many wait already.
            DeadlineError, CancelledError, PipeClosedError: As their names say; the entry is not in the buffer.
        """
        entry = self._entry(key, tokens, roi, value, nbytes, lease_s)
        event = threading.Event()
        with self._locked():
            self._state.insert(entry, None if deadline is None else event.set)
            waits = entry.wake is not None
        if not waits or deadline is None:
            return
        try:
            while not event.wait(self._nap(deadline, cancelled, self._state.next_lease_end)):
                with self._locked():
                    self._state.admit()
                self._check(deadline, cancelled)
        except BaseException as error:
            self._stop_insert(entry, error)
            return
        self._stop_insert(entry, None)

    async def insert_async(
        self,
        key: RequestId,
        tokens: npt.ArrayLike,
        roi: slice | None,
        value: V,
        nbytes: int,
        *,
        lease_s: float,
        deadline: float | None = None,
    ) -> None:
        """Do :meth:`insert` without blocking the event loop. A task cancelled too late leaves its entry there."""
        entry = self._entry(key, tokens, roi, value, nbytes, lease_s)
        event = asyncio.Event()
        with self._locked():
            self._state.insert(entry, None if deadline is None else _waker(event))
            waits = entry.wake is not None
        if not waits or deadline is None:
            return
        try:
            while not await _woken(event, self._nap(deadline, None, self._state.next_lease_end)):
                with self._locked():
                    self._state.admit()
                self._check(deadline, None)
        except BaseException as error:
            self._stop_insert(entry, error)
            return
        self._stop_insert(entry, None)

    def drop_select(
        self,
        tokens_or_key: npt.ArrayLike | RequestId,
        roi: slice | None = None,
        *,
        deadline: float,
        cancelled: Flag | None = None,
    ) -> V:
        """Take an entry out, waiting for it: nobody else gets it.

        Args:
            tokens_or_key: A key (its entries come in order), or the consumer's tokens (of the entries that match, the
                one that reaches furthest comes).
            roi: Of a consumer's tokens, those wanted: the entry holds the first of them. Default: from token 0 on where
                tokens are given, any where a key is.
            deadline: Seconds on the buffer's clock.
            cancelled: Set by another thread to give up.

        Raises:
            NotFoundError: The key was withdrawn meanwhile.
            QueueFullError: Too many queries wait.
            DeadlineError, CancelledError, PipeClosedError: As their names say.
        """
        return self._query(tokens_or_key, roi, consume=True, deadline=deadline, cancelled=cancelled)

    def select(
        self,
        tokens_or_key: npt.ArrayLike | RequestId,
        roi: slice | None = None,
        *,
        deadline: float,
        cancelled: Flag | None = None,
    ) -> V:
        """Do :meth:`drop_select` but leave the entry there for others."""
        return self._query(tokens_or_key, roi, consume=False, deadline=deadline, cancelled=cancelled)

    async def drop_select_async(
        self, tokens_or_key: npt.ArrayLike | RequestId, roi: slice | None = None, *, deadline: float
    ) -> V:
        """Do :meth:`drop_select` without a thread. A cancelled task leaves the entry to the next consumer."""
        return await self._query_async(tokens_or_key, roi, consume=True, deadline=deadline)

    async def select_async(
        self, tokens_or_key: npt.ArrayLike | RequestId, roi: slice | None = None, *, deadline: float
    ) -> V:
        """Do :meth:`select` without a thread."""
        return await self._query_async(tokens_or_key, roi, consume=False, deadline=deadline)

    def withdraw(self, key: RequestId) -> list[V]:
        """Take out all of a key's entries that no consumer has, and return them; whoever waits for the key is told."""
        with self._locked():
            return self._state.withdraw(key)

    def close(self) -> None:
        """End all waits and drop all entries; harmless if repeated."""
        with self._locked():
            self._state.close()

    def check_integrity(self) -> None:
        """Check the books (for tests).

        Raises:
            AssertionError: They don't agree.
        """
        with self._lock:
            self._state.check()

    def _entry(
        self, key: RequestId, tokens: npt.ArrayLike, roi: slice | None, value: V, nbytes: int, lease_s: float
    ) -> Entry[V]:
        array = token_array(tokens)
        start, stop = region(roi, len(array))
        if not 0 <= nbytes <= self._state.max_bytes:
            raise InvalidRequestError(
                f"an entry of {nbytes} bytes can never fit into {self._state.max_bytes}", field="nbytes"
            )
        return Entry(key, array, start, stop, value, nbytes, self._clock() + lease_s)

    def _waiter(
        self, tokens_or_key: npt.ArrayLike | RequestId, roi: slice | None, consume: bool, wake: Wake
    ) -> Waiter[V]:
        if isinstance(tokens_or_key, str):
            start = None if roi is None else roi.start or 0
            return Waiter(RequestId(tokens_or_key), start, None, consume, wake)
        array = token_array(tokens_or_key)
        start, _ = region(roi, len(array))
        with self._lock:  # the hasher's table of powers grows
            return Waiter(None, start, self._state.query(array, start), consume, wake)

    def _query(
        self,
        tokens_or_key: npt.ArrayLike | RequestId,
        roi: slice | None,
        *,
        consume: bool,
        deadline: float,
        cancelled: Flag | None,
    ) -> V:
        event = threading.Event()
        waiter = self._waiter(tokens_or_key, roi, consume, event.set)
        with self._locked():
            self._state.ask(waiter)
            if waiter.done:
                return self._state.collect(waiter)
        try:
            while not event.wait(self._nap(deadline, cancelled, None)):
                self._check(deadline, cancelled)
        except BaseException as error:
            return self._settle(waiter, error)
        return self._settle(waiter, None)

    async def _query_async(
        self, tokens_or_key: npt.ArrayLike | RequestId, roi: slice | None, *, consume: bool, deadline: float
    ) -> V:
        event = asyncio.Event()
        waiter = self._waiter(tokens_or_key, roi, consume, _waker(event))
        with self._locked():
            self._state.ask(waiter)
            if waiter.done:
                return self._state.collect(waiter)
        try:
            while not await _woken(event, self._nap(deadline, None, None)):
                self._check(deadline, None)
        except BaseException as error:
            return self._settle(waiter, error)
        return self._settle(waiter, None)

    def _settle(self, waiter: Waiter[V], error: BaseException | None) -> V:
        """End a query's wait: with its entry if that came first, and not for a caller that went away."""
        with self._locked():
            if error is None or (isinstance(error, DeadlineError) and waiter.done):
                return self._state.collect(waiter)
            self._state.leave(waiter)
        raise error

    def _stop_insert(self, entry: Entry[V], error: BaseException | None) -> None:
        """End an insert's wait: well if the entry was stored or taken, whatever the caller was told meanwhile."""
        with self._locked():
            settled = self._state.stop_insert(entry)
        if entry.error is not None:
            raise entry.error
        if error is not None and (not settled or not isinstance(error, DeadlineError | CancelledError)):
            raise error

    def _nap(self, deadline: float, cancelled: Flag | None, lease_end: Callable[[], float | None] | None) -> float:
        """Seconds to wait before looking again: to the deadline, a lease's end or a tick."""
        left = max(0.0, deadline - self._clock())
        if lease_end is not None:
            with self._lock:
                lease = lease_end()
            if lease is not None:
                left = min(left, max(TICK_S, lease - self._clock()))
        return left if cancelled is None else min(left, TICK_S)

    def _check(self, deadline: float, cancelled: Flag | None) -> None:
        if cancelled is not None and cancelled.is_set():
            raise CancelledError("cancelled while waiting in the lookup buffer")
        if self._clock() >= deadline:
            raise DeadlineError("deadline passed while waiting in the lookup buffer")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, then tell of what was dropped."""
        try:
            with self._lock:
                try:
                    yield
                finally:
                    dropped, self._state.dropped = self._state.dropped, []
        finally:
            for entry in dropped:
                log.info("dropped an entry of %s that nobody took", entry.key)
                if self._on_drop is not None:
                    self._on_drop(entry.key, entry.value)


def _waker(event: asyncio.Event) -> Wake:
    loop = asyncio.get_running_loop()
    return lambda: loop.call_soon_threadsafe(event.set)


async def _woken(event: asyncio.Event, timeout: float) -> bool:
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return False
    return True
