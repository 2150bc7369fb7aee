"""One timer for many ends of time."""

from __future__ import annotations

import asyncio

from baton_router.dispatch.event_loop import Deadlines


class Item:
    def __init__(self, name: str, ended: list[str], done: asyncio.Event) -> None:
        self._name, self._ended, self._done = name, ended, done

    def expire(self) -> None:
        self._ended.append(self._name)
        self._done.set()


async def test_everybody_ends_in_turn_but_who_was_taken_out() -> None:
    deadlines, done = Deadlines(0.05), asyncio.Event()
    ended: list[str] = []
    items = [Item(name, ended, done) for name in "abcd"]
    for item in items:
        deadlines.add(item)
    deadlines.discard(items[0])
    deadlines.discard(items[2])
    deadlines.discard(items[2])
    async with asyncio.timeout(240):
        while len(deadlines):
            await done.wait()
            done.clear()
    assert ended == ["b", "d"]


async def test_who_comes_later_ends_later() -> None:
    deadlines, done = Deadlines(0.05), asyncio.Event()
    ended: list[str] = []
    first, second = Item("first", ended, done), Item("second", ended, done)
    deadlines.add(first)
    async with asyncio.timeout(240):
        await done.wait()
        assert len(deadlines) == 0
        done.clear()
        deadlines.add(second)
        await done.wait()
    assert ended == ["first", "second"]
