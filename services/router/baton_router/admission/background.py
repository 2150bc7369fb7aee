"""Requests of the lowest class, which run in capacity that nothing else needs.

They start only while much of the cluster is idle: how many may run follows from the load at each moment. When another
request has to wait, the newest of them are interrupted until it can start, and their sender sends them again. On the
instances they give way by their priority (``BACKGROUND_PRIORITY``).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

from baton_router.admission.gate import Admission
from baton_router.types import Account

_TICK_S = 0.01
"""Seconds between two looks for idle capacity."""


class Interruptible(Protocol):
    """A request that can be interrupted."""

    def interrupt(self) -> None:
        """End the request on all instances, before :meth:`BackgroundSlots.release`."""


I = TypeVar("I", bound=Interruptible)  # noqa: E741


class _Waiter:
    def __init__(self, make: Callable[[], Interruptible | None]) -> None:
        self.make = make
        self.granted: asyncio.Future[Interruptible] = asyncio.get_running_loop().create_future()


class BackgroundSlots:
    """Grants idle capacity to tenants in turns, and takes it back. Used in one event loop.

    Args:
        admission: Admission of all requests.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._running: dict[Interruptible, None] = {}
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        self._granted: set[str] = set()
        """Tenants of the requests that started since the last look."""
        self._ticker: asyncio.Handle | None = None
        admission.on_wait = self._give_way

    @property
    def num_running(self) -> int:
        """Number of requests that run."""
        return len(self._running)

    def may_run(self, account: Account | None) -> bool:
        """Whether a tenant's limits leave enough for its other requests."""
        if account is None or not account.limited:
            return True
        # What was granted just now does not count against the limits yet.
        return account.name not in self._granted and self._admission.has_spare(account)

    async def acquire(self, tenant: str, make: Callable[[], I | None]) -> I:
        """Wait for idle capacity.

        Args:
            tenant: Tenant whose turn it takes.
            make: Returns the request that starts now; ``None``: the tenant cannot start one yet.

        Returns:
            The request; it counts as running until :meth:`release`.
        """
        waiter = _Waiter(make)
        self._waiting.setdefault(tenant, deque()).append(waiter)
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().call_soon(self._tick)
        try:
            return cast(I, await waiter.granted)
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.release(waiter.granted.result())
            else:
                self._remove(tenant, waiter)
            raise

    def release(self, request: Interruptible) -> None:
        """Give capacity back: a request has ended."""
        self._running.pop(request, None)

    def _remove(self, tenant: str, waiter: _Waiter) -> None:
        line = self._waiting[tenant]
        line.remove(waiter)
        if not line:
            del self._waiting[tenant]

    def _tick(self) -> None:
        self._ticker = None
        self._granted.clear()
        left = self._admission.idle_sequences(len(self._running)) if self._waiting else 0
        while left > 0 and (granted := self._grant_next()):
            left -= granted
        if self._waiting:
            self._ticker = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _grant_next(self) -> bool:
        """Start the next tenant's request; ``False``: no tenant can start one."""
        for tenant, line in list(self._waiting.items()):
            waiter = line[0]
            request = waiter.make()
            if request is None:
                continue
            self._running[request] = None
            self._granted.add(tenant)
            self._remove(tenant, waiter)
            if tenant in self._waiting:
                self._waiting.move_to_end(tenant)
            waiter.granted.set_result(request)
            return True
        return False

    def _give_way(self) -> None:
        """Interrupt the newest requests while another one waits."""
        while self._running and self._admission.foreground_waits():
            request, _ = self._running.popitem()
            request.interrupt()
