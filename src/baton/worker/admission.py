"""Who is let in: requests are counted, and refused while the instance drains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from baton.errors import UnavailableError


class Admission:
    """Counts the calls in progress and closes the door for a drain."""

    def __init__(self) -> None:
        self.draining = False
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> int:
        """Calls in progress."""
        return self._active

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count one call.

        Raises:
            UnavailableError: The instance drains.
        """
        if self.draining:
            raise UnavailableError("the instance is draining", retry_after_s=1.0)
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if self._active == 0:
                self._idle.set()

    async def drain(self, timeout_s: float) -> int:
        """Admit nobody any more and wait for those inside.

        Returns:
            Calls still in progress when the time was up.
        """
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return self._active
        return 0
