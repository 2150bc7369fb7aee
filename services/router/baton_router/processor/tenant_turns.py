"""Turns of tenants at what only few may do at once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class TenantTurns:
    """Lets so many pieces of work go on at once; tenants that wait take turns, however much each of them sends.

    Args:
        slots: How many.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def acquire(self, tenant: str) -> None:
        """Wait for a turn; give it back with :meth:`release`."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._waiting.setdefault(tenant, deque())
        line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # it came in the same moment: the next one's
            else:
                line.remove(turn)
                if not line:
                    del self._waiting[tenant]
            raise

    def release(self) -> None:
        """End a turn: the next tenant's that waits begins."""
        for tenant, line in list(self._waiting.items()):
            self._waiting.move_to_end(tenant)
            for turn in line:
                if not turn.done():
                    line.remove(turn)
                    if not line:
                        del self._waiting[tenant]
                    turn.set_result(None)
                    return
        self._free += 1
