"""Memory of the process: garbage in reference cycles, and what the C library's allocator keeps."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable

import psutil

from baton.background import keep_running

_LOOK_S = 1.0
_SHORTEST_S = 5.0
_LONGEST_S = 320.0
_MUCH = 16 << 20
"""Bytes whose growth or return counts."""
_GARBAGE = 64 << 20
_GARBAGE_SHARE = 0.1
"""Growth from which garbage is collected: in bytes, and as a share of the memory."""


def return_free_memory() -> None:
    """Return freed memory from the C library's allocator to the system, where the library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """Return the process's resident memory in bytes."""
    return int(psutil.Process().memory_info().rss)


class MemoryTrimmer:
    """Collects garbage when memory has grown, and returns freed memory to the system from time to time.

    Python collects garbage in reference cycles by the number of objects. An error that refers to a request of many
    megabytes is a few objects: thousands of them may wait. So a collection also runs when memory has grown by
    ``_GARBAGE`` bytes and ``_GARBAGE_SHARE``.

    A burst of long requests leaves holes all over the allocator's heap, which it would keep for ever. Walking over the
    heap costs up to a third of a second per GiB, in which other threads' allocations wait. So the pauses double while
    nothing is gained, from 5 s up to 320 s, and are 5 s again when memory has grown: it is returned within the time for
    which it was used.

    Args:
        trim: Returns freed memory; called in a thread.
        collect: Collects garbage in cycles; called in the event loop.
        resident: Returns the process's resident memory in bytes.
    """

    def __init__(
        self,
        trim: Callable[[], None] = return_free_memory,
        resident: Callable[[], int] = resident_bytes,
        collect: Callable[[], object] = gc.collect,
    ) -> None:
        self._trim = trim
        self._resident = resident
        self._collect = collect
        self._settled = self._collected = resident()
        self._pause_s = _LONGEST_S
        self._left_s = _LONGEST_S
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start looking at the memory, in a task of the running event loop."""
        self._task = keep_running(self._run, "memory trimmer")

    async def close(self) -> None:
        """End the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.look(_LOOK_S)

    async def look(self, elapsed_s: float) -> None:
        """Look at the memory, and return what is free if it is time to.

        Args:
            elapsed_s: Seconds since the last look.
        """
        before = self._resident()
        if before - self._collected > max(_GARBAGE, _GARBAGE_SHARE * self._collected):
            self._collect()
            self._collected = self._resident()
        self._collected = min(self._collected, before)
        if before - self._settled > _MUCH:
            self._settled = before
            self._pause_s = self._left_s = _SHORTEST_S
        else:
            self._settled = min(self._settled, before)
            self._left_s -= elapsed_s
        if self._left_s > 0:
            return
        await asyncio.to_thread(self._trim)
        self._settled = self._resident()
        self._collected = min(self._collected, self._settled)
        gained = before - self._settled > _MUCH
        self._pause_s = self._left_s = _SHORTEST_S if gained else min(2 * self._pause_s, _LONGEST_S)
