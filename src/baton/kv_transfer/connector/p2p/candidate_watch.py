"""Which prefill instances are silent: how long a load waits for one, and what routers say of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterator
from typing import TypeVar

from baton.errors import DeadlineError

T = TypeVar("T")
GRACE_S = 2.0
"""An instance that a router does not hear has so long to be heard here: who computes says so every second."""
ACKNOWLEDGE_S = 1.0
"""A call that is not acknowledged for so long goes to another instance: who lives does that in milliseconds, whatever
its engine is at."""
REST_S = 5.0
"""An instance that did not acknowledge a call is asked last for so long; routers say then whether they hear it."""


class CandidateWatch:
    """Patience with prefill instances. Used in one event loop.

    A load waits for an instance for ``stall_s`` after its last word. Where a router, too, has no answer from it, that
    becomes :data:`GRACE_S`, also for loads that wait already. Neither alone is believed: a router may be cut off from
    an instance that this process hears well.

    A call that somebody else could take waits :data:`ACKNOWLEDGE_S` for its first word. Where nobody else could, the
    prompt would have to be computed here, which is worth more patience.

    Args:
        stall_s: Seconds without a word after which an instance is given up.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._said: dict[object, frozenset[str]] = {}
        self._waiting: dict[str, set[asyncio.Timeout]] = {}
        self._rests: dict[str, float] = {}

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

    def is_last_choice(self, address: str) -> bool:
        """Whether an instance does not answer a router, or did not acknowledge a call a moment ago."""
        return self.is_silent(address) or self._rests.get(address, 0.0) > time.monotonic()

    async def wait(self, address: str, awaitable: Awaitable[T], *, first_word: bool = False) -> T:
        """Wait for something that an instance says or sends.

        Args:
            address: Of the instance.
            awaitable: What to wait for.
            first_word: Wait no longer than for the acknowledgement of a call.

        Raises:
            DeadlineError: It was silent for too long.
        """
        limit_s = min(ACKNOWLEDGE_S, self._stall_s) if first_word else self._stall_s
        try:
            async with asyncio.timeout(limit_s) as patience:
                with self._registered(address, patience):
                    word = await awaitable
        except TimeoutError:
            if first_word:
                now = time.monotonic()
                self._rests = {late: until for late, until in self._rests.items() if until > now}
                self._rests[address] = now + REST_S
                raise DeadlineError(f"it did not acknowledge the call within {limit_s:g} s") from None
            if self.is_silent(address):
                raise DeadlineError("it answers neither here nor a router") from None
            raise DeadlineError(f"no word for {limit_s:g} s") from None
        self._rests.pop(address, None)
        return word

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
