"""What a lookup buffer promises: bounds, exactly-once consumption, no lost wake-ups, no deadlock."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from baton.errors import (
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    PipeClosedError,
    QueueFullError,
)
from baton.kv_transfer import lookup_buffer
from baton.kv_transfer.lookup_buffer import LookupBuffer
from baton.types import RequestId

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def soon(seconds: float = 240.0) -> float:
    return time.monotonic() + seconds


async def begun(call: Coroutine[Any, Any, Any], buffer: LookupBuffer[Any]) -> asyncio.Task[Any]:
    """Start a call that has to wait, and let it get that far."""
    before = buffer.num_waiting
    task = asyncio.create_task(call)
    while buffer.num_waiting == before:
        assert not task.done(), "it did not wait"
        await asyncio.sleep(0)
    return task


async def within(tasks: Any, seconds: float = 240) -> Any:
    async with asyncio.timeout(seconds):
        return await tasks


async def test_entries_of_a_key_come_in_order_and_once() -> None:
    buffer: LookupBuffer[int] = LookupBuffer(1000)
    for i in range(5):
        buffer.insert(A, [1, 2, 3, 4], slice(0, i), i, 10, lease_s=60)
    assert [await buffer.drop_select(A, deadline=soon()) for _ in range(5)] == list(range(5))
    assert (len(buffer), buffer.num_bytes) == (0, 0)
    with pytest.raises(DeadlineError):
        await buffer.drop_select(A, deadline=time.monotonic())


async def test_requests_out_of_order_find_theirs() -> None:
    buffer: LookupBuffer[str] = LookupBuffer(1000)
    buffer.insert(A, [1, 2], None, "first", 1, lease_s=60)
    buffer.insert(B, [3, 4], None, "second", 1, lease_s=60)
    assert await buffer.drop_select([3, 4, 5], deadline=soon()) == "second"
    assert await buffer.drop_select(A, deadline=soon()) == "first"


async def test_match_by_tokens_takes_the_furthest_reaching_prefix() -> None:
    buffer: LookupBuffer[str] = LookupBuffer(1000)
    tokens = np.arange(100, dtype=np.uint32)
    other = tokens.copy()
    other[10] = 999
    buffer.insert(A, tokens, slice(0, 16), "16", 1, lease_s=60)
    buffer.insert(A, tokens, slice(0, 48), "48", 1, lease_s=60)
    buffer.insert(B, other, slice(0, 64), "other", 1, lease_s=60)
    buffer.insert(C, tokens, slice(0, 100), "too long", 1, lease_s=60)
    assert await buffer.select(tokens[:80], deadline=soon()) == "48"
    assert await buffer.select(tokens[:20], deadline=soon()) == "16"
    with pytest.raises(DeadlineError):
        await buffer.select(tokens[:15], deadline=time.monotonic())


async def test_roi_picks_the_entry_that_holds_its_first_token() -> None:
    buffer: LookupBuffer[str] = LookupBuffer(1000)
    tokens = np.arange(64)
    for start in (0, 16, 32):
        buffer.insert(A, tokens, slice(start, start + 16), f"from {start}", 1, lease_s=60)
    assert await buffer.drop_select(tokens, slice(20, 64), deadline=soon()) == "from 16"
    assert await buffer.drop_select(A, slice(32, None), deadline=soon()) == "from 32"
    with pytest.raises(DeadlineError):
        await buffer.drop_select(tokens, slice(40, 64), deadline=time.monotonic())
    assert await buffer.drop_select(tokens, deadline=soon()) == "from 0"


async def test_select_leaves_the_entry_for_others() -> None:
    buffer: LookupBuffer[int] = LookupBuffer(1000)
    lookers = [await begun(buffer.select(A, deadline=soon()), buffer) for _ in range(3)]
    taker = await begun(buffer.drop_select(A, deadline=soon()), buffer)
    buffer.insert(A, [1], None, 7, 1, lease_s=60)
    assert [await within(f) for f in [*lookers, taker]] == [7, 7, 7, 7]
    assert len(buffer) == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"nbytes": 101}, "nbytes"),
        ({"nbytes": -1}, "nbytes"),
        ({"roi": slice(0, 5)}, "roi"),
        ({"roi": slice(2, 1)}, "roi"),
        ({"roi": slice(0, 2, 2)}, "roi"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": [1 << 32]}, "tokens"),
        ({"tokens": ["x"]}, "tokens"),
        ({"tokens": [[1]]}, "tokens"),
    ],
)
async def test_bad_inserts_name_the_field_at_once(change: dict[str, Any], field: str) -> None:
    buffer: LookupBuffer[int] = LookupBuffer(100)
    arguments: dict[str, Any] = {"key": A, "tokens": [1, 2], "roi": None, "value": 0, "nbytes": 1} | change
    with pytest.raises(InvalidRequestError) as caught:
        await buffer.insert_when_room(**arguments, lease_s=1, deadline=soon())
    assert caught.value.field == field
    assert buffer.num_waiting == 0


async def test_a_full_buffer_refuses_or_waits() -> None:
    buffer: LookupBuffer[int] = LookupBuffer(100)
    buffer.insert(A, [1], None, 1, 80, lease_s=60)
    with pytest.raises(QueueFullError):
        buffer.insert(B, [2], None, 2, 30, lease_s=60)
    with pytest.raises(DeadlineError):
        await buffer.insert_when_room(B, [2], None, 2, 30, lease_s=60, deadline=soon(0.05))
    assert buffer.num_waiting == 0
    inserter = await begun(buffer.insert_when_room(B, [2], None, 2, 30, lease_s=60, deadline=soon()), buffer)
    assert await buffer.drop_select(A, deadline=soon()) == 1
    await within(inserter)
    assert buffer.num_bytes == 30


async def test_a_full_buffer_serves_the_query_whose_entry_waits_for_room() -> None:
    buffer: LookupBuffer[int] = LookupBuffer(100)
    buffer.insert(A, [1], None, 1, 100, lease_s=60)
    inserter = await begun(buffer.insert_when_room(B, [2], None, 2, 100, lease_s=60, deadline=soon()), buffer)
    assert await buffer.drop_select(B, deadline=soon()) == 2  # past the full buffer
    await within(inserter)
    query = await begun(buffer.drop_select([3, 4], deadline=soon()), buffer)
    # The consumer waits: no room is needed.
    await within(buffer.insert_when_room(C, [3, 4], None, 3, 100, lease_s=60, deadline=soon()))
    assert await within(query) == 3
    assert buffer.num_bytes == 100


async def test_room_is_made_by_dropping_what_nobody_claimed_before_its_lease_ended() -> None:
    dropped: list[tuple[RequestId, int]] = []
    buffer: LookupBuffer[int] = LookupBuffer(100, on_drop=lambda key, value: dropped.append((key, value)))
    buffer.insert(A, [1], None, 1, 60, lease_s=0.05)
    buffer.insert(B, [2], None, 2, 40, lease_s=60)
    await buffer.insert_when_room(C, [3], None, 3, 60, lease_s=60, deadline=soon())
    assert dropped == [(A, 1)]
    assert await buffer.drop_select(B, deadline=soon()) == 2
    assert await buffer.drop_select(C, deadline=soon()) == 3


async def test_an_entry_past_its_lease_is_still_found_while_there_is_room() -> None:
    now = 0.0
    buffer: LookupBuffer[int] = LookupBuffer(100, clock=lambda: now)
    buffer.insert(A, [1], None, 1, 60, lease_s=5)
    now = 10.0
    assert await buffer.drop_select(A, deadline=11) == 1


async def test_inserts_are_admitted_in_order_of_arrival() -> None:
    buffer: LookupBuffer[int] = LookupBuffer(100)
    buffer.insert(A, [1], None, 1, 60, lease_s=60)
    big = await begun(buffer.insert_when_room(B, [2], None, 2, 90, lease_s=60, deadline=soon()), buffer)
    small = await begun(buffer.insert_when_room(C, [3], None, 3, 20, lease_s=60, deadline=soon()), buffer)
    with pytest.raises(QueueFullError):
        buffer.insert(C, [3], None, 4, 20, lease_s=60)
    await buffer.drop_select(A, deadline=soon())
    await within(big)
    assert not small.done()
    await buffer.drop_select(B, deadline=soon())
    await within(small)


async def test_withdraw_tells_everybody() -> None:
    buffer: LookupBuffer[int] = LookupBuffer(100)
    query = await begun(buffer.drop_select(B, deadline=soon()), buffer)
    buffer.insert(A, [1], None, 1, 60, lease_s=60)
    buffer.insert(A, [1], None, 2, 40, lease_s=60)
    inserter = await begun(buffer.insert_when_room(A, [1], None, 3, 60, lease_s=60, deadline=soon()), buffer)
    assert buffer.withdraw(A) == [1, 2, 3]
    with pytest.raises(CancelledError):
        await within(inserter)
    assert buffer.withdraw(B) == []
    with pytest.raises(NotFoundError):
        await within(query)
    assert (buffer.num_bytes, buffer.num_waiting) == (0, 0)


async def test_close_wakes_everybody_and_hands_back_the_rest() -> None:
    dropped: list[int] = []
    buffer: LookupBuffer[int] = LookupBuffer(100, on_drop=lambda key, value: dropped.append(value))
    buffer.insert(A, [1], None, 1, 60, lease_s=60)
    calls = [
        await begun(buffer.drop_select(B, deadline=soon()), buffer),
        await begun(buffer.select([9], deadline=soon()), buffer),
        await begun(buffer.insert_when_room(C, [1], None, 2, 60, lease_s=60, deadline=soon()), buffer),
    ]
    buffer.close()
    for call in calls:
        with pytest.raises(PipeClosedError):
            await within(call)
    assert sorted(dropped) == [1, 2]
    with pytest.raises(PipeClosedError):
        buffer.insert(A, [1], None, 1, 1, lease_s=1)
    buffer.close()


async def test_waits_can_be_cancelled() -> None:
    buffer: LookupBuffer[int] = LookupBuffer(100)
    buffer.insert(A, [1], None, 1, 100, lease_s=60)
    calls = [
        await begun(buffer.drop_select(B, deadline=soon()), buffer),
        await begun(buffer.insert_when_room(C, [1], None, 2, 60, lease_s=60, deadline=soon()), buffer),
    ]
    for call in calls:
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert (buffer.num_waiting, len(buffer)) == (0, 1)
    buffer.check_integrity()


async def test_expired_entries_are_dropped_when_asked() -> None:
    now, dropped = 0.0, []
    buffer: LookupBuffer[int] = LookupBuffer(
        100, on_drop=lambda key, value: dropped.append((key, value)), clock=lambda: now
    )
    buffer.insert(A, [1], None, 1, 60, lease_s=5)
    buffer.insert(B, [1], None, 2, 40, lease_s=9)
    now = 5.0
    buffer.drop_expired()
    assert dropped == [(A, 1)]
    assert (len(buffer), buffer.num_bytes) == (1, 40)


async def test_an_entry_without_tokens_is_found_by_its_key_alone() -> None:
    buffer: LookupBuffer[int] = LookupBuffer(100)
    buffer.insert(A, None, None, 1, 1, lease_s=60)
    with pytest.raises(DeadlineError):
        await buffer.drop_select([1, 2], deadline=time.monotonic())
    assert await buffer.drop_select(A, deadline=soon()) == 1


async def test_waiting_calls_are_bounded() -> None:
    buffer: LookupBuffer[int] = LookupBuffer(100, max_waiting=1)
    query = await begun(buffer.drop_select(B, deadline=soon()), buffer)
    with pytest.raises(QueueFullError):
        await buffer.select(C, deadline=soon())
    buffer.insert(B, [1], None, 5, 1, lease_s=1)
    assert await within(query) == 5


async def test_coroutines_wait_without_threads() -> None:
    buffer: LookupBuffer[int] = LookupBuffer(10_000)
    before = threading.active_count()
    tasks = [asyncio.create_task(buffer.drop_select(RequestId(f"r{i}"), deadline=soon())) for i in range(500)]
    await asyncio.sleep(0)
    assert buffer.num_waiting == 500
    assert threading.active_count() <= before

    def produce() -> None:
        for i in reversed(range(500)):
            buffer.insert(RequestId(f"r{i}"), [i], None, i, 1, lease_s=60)

    producer = asyncio.create_task(asyncio.to_thread(produce))
    assert await asyncio.gather(*tasks) == list(range(500))
    await within(producer)
    assert len(buffer) == 0
    with pytest.raises(DeadlineError):
        await buffer.select(A, deadline=soon(0.01))


async def test_a_cancelled_consumer_gives_its_entry_to_the_next() -> None:
    buffer: LookupBuffer[int] = LookupBuffer(100)
    first = asyncio.create_task(buffer.drop_select(A, deadline=soon()))
    second = asyncio.create_task(buffer.drop_select(A, deadline=soon()))
    await asyncio.sleep(0)
    assert buffer.num_waiting == 2
    buffer.insert(A, [1], None, 1, 10, lease_s=60)  # claimed for the first, which has not run yet
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == 1
    third = asyncio.create_task(buffer.drop_select(A, deadline=soon()))
    await asyncio.sleep(0)
    buffer.insert(A, [1], None, 2, 10, lease_s=60)
    third.cancel()
    with pytest.raises(asyncio.CancelledError):
        await third
    assert buffer.num_bytes == 10
    assert await buffer.drop_select(A, deadline=soon()) == 2
    buffer.check_integrity()


async def test_an_entry_that_came_back_from_a_cancelled_consumer_can_still_be_dropped() -> None:
    buffer: LookupBuffer[int] = LookupBuffer(100)
    consumer = asyncio.create_task(buffer.drop_select(A, deadline=soon()))
    await asyncio.sleep(0)
    buffer.insert(A, [1], None, 1, 100, lease_s=0.01)  # claimed, and its room is taken
    with pytest.raises(QueueFullError):
        buffer.insert(B, [1], None, 2, 1, lease_s=60)
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert len(buffer) == 1
    await buffer.insert_when_room(B, [1], None, 2, 1, lease_s=60, deadline=soon())
    assert await buffer.drop_select(B, deadline=soon()) == 2
    buffer.check_integrity()


async def test_async_inserts_wait_for_room_and_for_leases() -> None:
    buffer: LookupBuffer[int] = LookupBuffer(100)
    await buffer.insert_when_room(A, [1], None, 1, 100, lease_s=60, deadline=soon())
    task = asyncio.create_task(buffer.insert_when_room(B, [2], None, 2, 100, lease_s=0.02, deadline=soon()))
    await asyncio.sleep(0)
    assert buffer.num_waiting == 1
    assert await buffer.drop_select(A, deadline=soon()) == 1
    await task
    await buffer.insert_when_room(C, [3], None, 3, 100, lease_s=60, deadline=soon())  # b's lease ends
    with pytest.raises(DeadlineError):
        await buffer.select(B, deadline=soon(0.01))
    assert await buffer.select(C, deadline=soon()) == 3


def test_a_consumer_whose_loop_was_closed_loses_nothing_for_others() -> None:
    buffer: LookupBuffer[int] = LookupBuffer(100)
    loop = asyncio.new_event_loop()
    task = loop.create_task(buffer.drop_select(A, deadline=soon()))
    loop.run_until_complete(asyncio.sleep(0))
    assert buffer.num_waiting == 1
    coroutine = task.get_coro()
    loop.close()
    buffer.insert(A, [1], None, 1, 10, lease_s=60)
    assert buffer.num_waiting == 0
    assert asyncio.run(buffer.drop_select(A, deadline=soon())) == 1
    with pytest.raises(asyncio.CancelledError):
        coroutine.throw(asyncio.CancelledError())  # type: ignore[union-attr]
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_every_entry_is_consumed_exactly_once_under_contention() -> None:
    """8 producers and 8 consumers, each with an event loop, on a buffer of 5 entries; half of them ask by tokens."""
    buffer: LookupBuffer[tuple[int, int]] = LookupBuffer(50, max_entries=5)
    per_producer, got, lock = 150, [], threading.Lock()

    async def produce(who: int) -> None:
        for i in range(per_producer):
            key = RequestId(str((who * per_producer + i) % 8))
            value = who, i
            await buffer.insert_when_room(key, [int(key), 5], None, value, 10, lease_s=60, deadline=soon())

    async def consume(which: int) -> None:
        query: Any = RequestId(str(which)) if which % 2 else [which, 5, 6]
        for _ in range(per_producer):
            value = await buffer.drop_select(query, deadline=soon())
            with lock:
                got.append(value)

    with ThreadPoolExecutor(16) as pool:
        calls = [pool.submit(asyncio.run, produce(i)) for i in range(8)]
        calls += [pool.submit(asyncio.run, consume(i)) for i in range(8)]
        for call in calls:
            call.result(240)
    assert sorted(got) == [(who, i) for who in range(8) for i in range(per_producer)]
    buffer.check_integrity()
    assert (len(buffer), buffer.num_bytes, buffer.num_waiting) == (0, 0, 0)


async def test_look_up_by_tokens_does_not_compare_with_every_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer: LookupBuffer[int] = LookupBuffer(1 << 30)
    compared, matches = [0], lookup_buffer.matches

    def counted(*args: Any) -> bool:
        compared[0] += 1
        return matches(*args)

    monkeypatch.setattr(lookup_buffer, "matches", counted)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 50_000, (2000, 2048), dtype=np.uint32)
    for i, prompt in enumerate(prompts):
        buffer.insert(RequestId(str(i)), prompt, None, i, 1, lease_s=600)
    for i in range(0, 2000, 10):
        assert await buffer.drop_select(prompts[i], deadline=soon()) == i
    assert compared[0] == 200


async def test_nothing_is_kept_of_entries_that_were_consumed() -> None:
    """A buffer that is never full, and in which no lease ends, does not grow with what went through it."""
    buffer: LookupBuffer[Any] = LookupBuffer(1 << 20)
    buffer.insert(B, None, None, None, 1, lease_s=1)  # the lease that ends first stays
    values = [np.zeros(1) for _ in range(1000)]
    gone = [weakref.ref(value) for value in values]
    while values:
        buffer.insert(A, None, None, values.pop(), 1, lease_s=60)
        await buffer.drop_select(A, deadline=soon())
    assert sum(value() is not None for value in gone) < 100


async def test_a_lease_begins_when_there_is_room() -> None:
    now = 0.0
    buffer: LookupBuffer[int] = LookupBuffer(100, clock=lambda: now)
    buffer.insert(A, [1], None, 1, 100, lease_s=60)
    inserter = await begun(buffer.insert_when_room(B, [2], None, 2, 100, lease_s=5, deadline=20), buffer)
    now = 10.0
    assert await buffer.drop_select(A, deadline=20) == 1
    await within(inserter)
    now = 14.0
    buffer.drop_expired()
    assert len(buffer) == 1
    now = 15.0
    buffer.drop_expired()
    assert len(buffer) == 0
