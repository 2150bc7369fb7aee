"""Freed memory is returned to the system soon after a burst, and rarely looked for otherwise."""

from __future__ import annotations

import asyncio

from baton.allocator import MemoryTrimmer

MIB = 1 << 20


class Heap:
    """A process's memory: what is freed stays resident until it is trimmed."""

    def __init__(self) -> None:
        self.live = self.resident = 100 * MIB
        self.trims = 0

    def use(self, live: int) -> None:
        self.live = live
        self.resident = max(self.resident, live)

    def trim(self) -> None:
        self.trims += 1
        self.resident = self.live


async def look(trimmer: MemoryTrimmer, seconds: float) -> None:
    for _ in range(int(seconds / 5)):
        await trimmer.look(5.0)


async def test_a_burst_is_returned_soon() -> None:
    for burst_s in range(0, 600, 5):
        heap = Heap()
        trimmer = MemoryTrimmer(heap.trim, lambda heap=heap: heap.resident)  # type: ignore[misc]
        await look(trimmer, 1000)
        heap.use(400 * MIB)
        await look(trimmer, burst_s)
        heap.use(110 * MIB)
        await look(trimmer, burst_s + 10)  # no longer than it lasted
        assert heap.resident == 110 * MIB, f"after a burst of {burst_s} s"


async def test_memory_that_is_level_is_rarely_looked_for() -> None:
    heap = Heap()
    trimmer = MemoryTrimmer(heap.trim, lambda: heap.resident)
    await look(trimmer, 3200)
    assert heap.trims == 10


async def test_memory_that_is_needed_is_looked_for_less_and_less() -> None:
    heap = Heap()
    trimmer = MemoryTrimmer(heap.trim, lambda: heap.resident)
    heap.use(300 * MIB)
    await look(trimmer, 640)  # after 10, 20, 40, 80, 160, 320 and 640 s
    assert heap.trims == 7


async def test_it_ends() -> None:
    trimmer = MemoryTrimmer()
    trimmer.start()
    await trimmer.close()
    assert not any(task.get_name() == "memory trimmer" for task in asyncio.all_tasks())


async def test_garbage_is_collected_when_memory_has_grown() -> None:
    heap = Heap()
    collected: list[int] = []

    def collect() -> None:
        collected.append(heap.resident)
        heap.live = heap.resident = 110 * MIB

    trimmer = MemoryTrimmer(heap.trim, lambda: heap.resident, collect)
    for resident in (150, 163, 165, 130, 140, 180):
        heap.resident = resident * MIB
        await trimmer.look(1.0)
    assert collected == [165 * MIB, 180 * MIB], "64 MiB more than before"
