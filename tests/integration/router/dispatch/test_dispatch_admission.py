"""Admission in the dispatcher: what waits, what gets in, and that its books add up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace
from tests.support.router.world import Router, World, make_request, run

from baton.errors import OverloadedError, QueueFullError, SloError, UnavailableError


def assert_nothing_waits(router: Router) -> None:
    router.assert_nothing_held()
    admission = router.dispatcher.admission
    assert len(admission.queue) == 0
    assert admission._ticker is None
    assert admission._in_flight == 0, "not even what rounding leaves over"
    assert (admission._room._due_sequences, admission._room._due_tokens) == (0, 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(3))
async def test_cancelled_at_any_moment_nothing_is_left(world: World, seed: int) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes, instance_slots=2)
    router.dispatcher._placer._speeds.output.add(0.0, 2.1, 0.0)  # so that estimates are no whole numbers
    tasks = [asyncio.create_task(run(router, make_request(f"r{i}", max_tokens=3 + i % 5))) for i in range(60)]
    for i, task in enumerate(tasks):
        for _ in range((7 * i + seed) % 5):
            await asyncio.sleep(0)
        if (i + seed) % 3 == 0:
            tasks[(i * 11 + seed) % 60].cancel()
        task.cancelled()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(x, asyncio.CancelledError) or not isinstance(x, BaseException) for x in results)
    assert any(not isinstance(x, BaseException) for x in results)
    await until(lambda: router.dispatcher.num_in_flight == 0)
    assert_nothing_waits(router)


async def test_workers_get_what_they_can_run_and_little_more(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    decode.state.pause_after = 1
    tasks = [asyncio.create_task(run(router, make_request(f"r{i}"))) for i in range(100)]
    await decode.wait_until(lambda: len(decode.state.running) == 72)  # 64 in a batch, and an eighth
    await until(lambda: len(router.dispatcher.admission.queue) == 28)
    assert len(decode.state.running) == 72
    decode.state.pause_after = None
    decode.changed()
    await asyncio.gather(*tasks)
    assert_nothing_waits(router)


async def test_an_instance_where_requests_wait_gets_no_more(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    decode.set_load(num_running=64, num_waiting=40)
    await router.until(lambda: router.instance(decode).load.report.num_waiting == 40)
    await until(lambda: not router.dispatcher.admission._room.is_free())  # a look at the instances is good for 10 ms
    task = asyncio.create_task(run(router, make_request()))
    await until(lambda: len(router.dispatcher.admission.queue) == 1)
    decode.set_load(num_running=64, num_waiting=0)
    await task
    assert_nothing_waits(router)


async def test_prompts_wait_for_prefill_instances(world: World) -> None:
    (prefill,), (decode,) = await world.prefills(1), await world.decodes(1)
    router = await world.cluster([prefill], [decode], prefill_queue_tokens=100)
    decode.state.pause_after = 0
    tasks = [asyncio.create_task(run(router, make_request(f"r{i}", prompt=[i] * 32))) for i in range(6)]
    await until(lambda: len(router.dispatcher.admission.queue) == 2)  # 32 tokens each: the fourth begins below 100
    decode.state.pause_after = 1
    decode.changed()
    await decode.wait_until(lambda: len(decode.state.running) == 6)  # a first token frees its prefill instance
    decode.state.pause_after = None
    decode.changed()
    await asyncio.gather(*tasks)
    assert_nothing_waits(router)


async def test_prompts_get_a_second_of_work_once_it_is_known_how_much_that_is(world: World) -> None:
    (prefill,), (decode,) = await world.prefills(1), await world.decodes(1)
    router = await world.cluster([prefill], [decode])
    room, speeds = router.dispatcher.admission._room, router.dispatcher._placer._speeds
    assert speeds is not None
    book = router.instance(prefill).load
    book.tokens += 50_000
    await until(room.is_free)
    for _ in range(5):
        speeds.prefill.add("p0", 1000, 100.0)
    await until(lambda: not room.is_free())  # 0.1 ms per token: 10,000 are a second
    book.tokens = 9_000
    await until(room.is_free)
    for _ in range(100):
        speeds.prefill.add("p0", 1000, 10_000.0)
    await until(lambda: not room.is_free())  # 4096 at the least
    book.tokens = 4_000
    await until(room.is_free)
    book.tokens = 0


async def test_decode_instances_that_are_fast_enough_go_first(world: World) -> None:
    decodes = await world.decodes(2, caches=False)
    router = await world.cluster([], decodes)
    speeds = router.dispatcher._placer._speeds
    assert speeds is not None
    for _ in range(5):
        speeds.decode.add("d0", 1, 80.0)
        speeds.decode.add("d1", 1, 5.0)
    answers = [await run(router, replace(make_request(f"r{i}", max_tokens=1), itl_ms=20.0)) for i in range(6)]
    assert {answer.trace.decode_instance for answer in answers} == {"d1"}
    with pytest.raises(SloError, match=r"d1, measures 5\.0 ms") as caught:
        await run(router, replace(make_request(), itl_ms=1.0))
    assert caught.value.field == "itl_ms"
    assert_nothing_waits(router)


async def test_a_wait_that_is_too_long_for_a_deadline_is_foreseen(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode], instance_slots=1)
    admission = router.dispatcher.admission
    decode.state.pause_after = 1
    tasks = [asyncio.create_task(run(router, make_request("first")))]
    await decode.wait_until(lambda: len(decode.state.running) == 1)
    tasks.append(asyncio.create_task(run(router, make_request("second"))))
    await until(lambda: len(admission.queue) == 1)
    admission._drain.add_served(admission._in_flight, 100.0)  # as if one like the first had taken so long
    with pytest.raises(SloError, match="of work ahead in the queue") as caught:
        await run(router, replace(make_request("late", prompt=[3] * 40), ttft_ms=5_000.0, tenant="other"))
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 10
    tasks.append(asyncio.create_task(run(router, replace(make_request("urgent"), ttft_ms=20_000.0, priority=-1))))
    await until(lambda: len(admission.queue) == 2)  # nobody is ahead of it
    decode.state.pause_after = None
    decode.changed()
    await asyncio.gather(*tasks)
    assert [x.request_id for x in decode.state.requests] == ["first", "urgent", "second"]
    assert_nothing_waits(router)


async def test_a_queue_without_instances_ends(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode], instance_slots=1, no_instance_wait_s=0.2)
    decode.state.pause_after = 1
    tasks = [asyncio.create_task(run(router, make_request(f"r{i}"))) for i in range(4)]
    await until(lambda: len(router.dispatcher.admission.queue) == 3)
    await decode.stop()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, UnavailableError)
        assert not isinstance(result, OverloadedError)
    assert_nothing_waits(router)


async def test_a_router_that_ends_tells_those_that_wait(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode], instance_slots=1)
    decode.state.pause_after = 1
    tasks = [asyncio.create_task(run(router, make_request(f"r{i}"))) for i in range(3)]
    await until(lambda: len(router.dispatcher.admission.queue) == 2)
    router.dispatcher.cut_off()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, UnavailableError)
        assert "shutting down" in result.message
    await until(lambda: router.dispatcher.num_in_flight == 0)
    assert_nothing_waits(router)


async def test_without_a_queue_what_has_no_room_is_refused(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode], instance_slots=1, queue_requests=0)
    decode.state.pause_after = 1
    task = asyncio.create_task(run(router, make_request()))
    await decode.wait_until(lambda: len(decode.state.running) == 1)
    with pytest.raises(QueueFullError) as caught:
        await run(router, make_request("second"))
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 0
    decode.state.pause_after = None
    decode.changed()
    await task
    assert_nothing_waits(router)
