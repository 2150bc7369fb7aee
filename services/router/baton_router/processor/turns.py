"""Long work in threads, in turns of the tenants that it is done for."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.errors import UnavailableError

T = TypeVar("T")
_WAIT_S = 30.0
_PAUSE_TURNS = 8


class TenantTurns:
    """Bounds concurrent work; waiting tenants take turns, however many requests each of them sends.

    Args:
        slots: Most concurrent pieces of work.
        per_tenant: Most of them of one tenant, for which the others stay free; 0: no limit.
    """

    def __init__(self, slots: int, per_tenant: int = 0) -> None:
        self._free = slots
        self._per_tenant = per_tenant or slots
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Hold a turn of a tenant for work on the event loop.

        The next one comes ``_PAUSE_TURNS`` turns of the loop later: a short request takes about as many from its
        connection to its answer, and would wait for work of others in each of them.
        """
        await self.acquire(tenant)
        try:
            yield
        finally:
            self._release_after(tenant, _PAUSE_TURNS)

    def _release_after(self, tenant: str, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._release_after, tenant, turns - 1)
        else:
            self.release(tenant)

    async def acquire(self, tenant: str) -> None:
        """Wait for a turn; give it back with :meth:`release`."""
        if self._free and self._running[tenant] < self._per_tenant:
            self._start(tenant)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._waiting.setdefault(tenant, deque())
        line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(tenant)  # granted in the same moment: pass it on
            else:
                line.remove(turn)
                if not line:
                    del self._waiting[tenant]
            raise

    def release(self, tenant: str) -> None:
        """End a turn of a tenant, and start that of the next one that waits."""
        self._free += 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        for waiting, line in list(self._waiting.items()):
            if self._running[waiting] >= self._per_tenant:
                continue
            self._waiting.move_to_end(waiting)
            for turn in line:
                if not turn.done():
                    line.remove(turn)
                    if not line:
                        del self._waiting[waiting]
                    self._start(waiting)
                    turn.set_result(None)
                    return

    def _start(self, tenant: str) -> None:
        self._free -= 1
        self._running[tenant] += 1


class TurnThreads:
    """Threads whose work is done in turns of its tenants.

    Args:
        count: Number of threads.
        name: Prefix of their names.
        what: What others have done while a tenant waits, for the error.
        per_tenant: Most of the threads for one tenant; 0: all of them.

    Attributes:
        turns: Turns of the threads.
    """

    def __init__(self, count: int, name: str, what: str, *, per_tenant: int = 0) -> None:
        self.turns = TenantTurns(count, per_tenant)
        self._what = what
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, tenant: str, work: Callable[[], T], *, before: TenantTurns | None = None) -> T:
        """Run work in a thread, in the turn of a tenant.

        Args:
            tenant: Tenant that it is done for.
            work: The work.
            before: Further turns that it needs, which are waited for first.

        Raises:
            UnavailableError: Other tenants' work took too long.
        """
        loop = asyncio.get_running_loop()
        acquired: list[TenantTurns] = []

        def release() -> None:
            for turns in acquired:
                turns.release(tenant)

        def on_done(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended before the thread
                loop.call_soon_threadsafe(release)

        try:
            async with asyncio.timeout(_WAIT_S):
                for turns in (self.turns,) if before is None else (before, self.turns):
                    await turns.acquire(tenant)
                    acquired.append(turns)
            future = self._threads.submit(work)
        except BaseException as error:
            release()
            if isinstance(error, TimeoutError):
                raise UnavailableError(f"others have {self._what}", retry_after_s=5.0) from error
            raise
        # A thread cannot be stopped: it keeps its turn until its end, even if the request was cancelled.
        future.add_done_callback(on_done)
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future  # it refers to an error of the work, whose traceback refers to this frame and the work's data
