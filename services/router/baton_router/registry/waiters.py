"""Requests that wait for an instance that can take them: first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque


class Waiters:
    """A queue of waiting requests; used in one event loop.

    A request that is woken must look again whether there is room; if there is none it waits again, behind the others.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    async def wait(self, timeout_s: float) -> None:
        """Wait to be woken, at most ``timeout_s`` seconds."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except TimeoutError:
            return
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.wake()  # this turn is not used: pass it on
            raise
        finally:
            # A wake that came in the same moment has passed it over, and it is gone from there.
            if (not turn.done() or turn.cancelled()) and turn in self._waiting:
                self._waiting.remove(turn)

    def wake(self, count: int = 1) -> None:
        """Wake the ``count`` requests that have waited longest."""
        while count > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                count -= 1

    def wake_all(self) -> None:
        """Wake all: some instance became more or less usable."""
        self.wake(len(self._waiting))
