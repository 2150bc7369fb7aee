"""Which prefill instances are silent: how long a load waits for one, and what routers say of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from typing import TypeVar

from baton.errors import DeadlineError

T = TypeVar("T")
GRACE_S = 2.0
"""An instance that a router does not hear has so long to be heard here: who computes says so every second."""


class CandidateWatch:
    """Patience with prefill instances. Used in one event loop.

    A load waits for an instance for ``stall_s`` after its last word. Where a router, too, has no answer from it, that
    becomes :data:`GRACE_S`, also for loads that wait already. Neither alone is believed: a router may be cut off from
    an instance that this process hears well.

    Args:
        stall_s: Seconds without a word after which an instance is given up.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._said: dict[object, frozenset[str]] = {}
        self._waiting: dict[str, set[asyncio.Timeout]] = {}

    def is_silent(self, address: str) -> bool:
        """Whether a router says that an instance does not answer."""
        return any(address in addresses for addresses in self._said.values())

    def tell(self, router: object, addresses: frozenset[str]) -> None:
        """Hear which instances do not answer a router now; replaces what it said before."""
        news = addresses - self._said.pop(router, frozenset())
        if addresses:
            self._said[router] = addresses
        for address in news:
            for patience in self._waiting.get(address, ()):
                _shorten(patience)

    async def wait(self, address: str, awaitable: Awaitable[T]) -> T:
        """Wait for something that an instance says or sends.

        Raises:
            DeadlineError: It was silent for too long.
        """
        try:
            async with asyncio.timeout(self._stall_s) as patience:
                with self._registered(address, patience):
                    return await awaitable
        except TimeoutError:
            if self.is_silent(address):
                raise DeadlineError("it answers neither here nor a router") from None
            raise DeadlineError(f"no word for {self._stall_s:g} s") from None

    @contextlib.contextmanager
    def _registered(self, address: str, patience: asyncio.Timeout) -> Iterator[None]:
        if self.is_silent(address):
            _shorten(patience)
        waiting = self._waiting.setdefault(address, set())
        waiting.add(patience)
        try:
            yield
        finally:
            waiting.discard(patience)
            if not waiting:
                self._waiting.pop(address, None)


def _shorten(patience: asyncio.Timeout) -> None:
    until = asyncio.get_running_loop().time() + GRACE_S
    now = patience.when()
    if not patience.expired() and (now is None or until < now):
        patience.reschedule(until)
