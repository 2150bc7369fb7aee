"""Fail-over, migration in mid-stream, refusals and cancellation over real sockets."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from tests.support.router.world import PROMPT, Answer, World, assert_right, make_request, read, registration, run
from tests.support.servers.fake_tokens import VOCAB_SIZE, expected_tokens
from tests.support.servers.fake_worker import FakeWorker

from baton.api.v1 import common_pb2, worker_pb2
from baton.errors import (
    CancelledError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    UnavailableError,
)
from baton.rpc.service_token import Token
from baton.types import Role
from baton_router.registry.instance import Status


@pytest.mark.parametrize("delivered", [1, 3, 7])
@pytest.mark.parametrize("n", [1, 3])
async def test_stream_goes_on_after_a_reset_connection(world: World, delivered: int, n: int) -> None:
    prefills, decodes = await world.prefills(1), await world.decodes(3)
    proxies = {w.instance_id: await world.proxy(w) for w in decodes}
    router = await world.router(
        prefill=(prefills[0].address,), decode=tuple(f"127.0.0.1:{p.port}" for p in proxies.values())
    )
    await router.ready(*prefills, *decodes)
    for worker in decodes:
        worker.state.pause_after = delivered
    request, answer = make_request(n=n, logprobs=0), Answer()
    stream = router.dispatcher.stream(request)
    await read(stream, answer, delivered)
    victim = next(w for w in decodes if w.state.running)
    for worker in decodes:
        worker.state.pause_after = None
    await proxies[victim.instance_id].cut()
    async for chunk in stream:
        answer.add(chunk)

    assert_right(answer, request)
    assert all(values == [-float(i) for i in range(1, 9)] for values in answer.logprobs.values())
    assert answer.trace.num_migrations == 1
    assert answer.trace.decode_instance != victim.instance_id
    moved = [r for w in decodes if w is not victim for r in w.state.requests]
    assert sorted(len(r.output_token_ids) for r in moved) == [delivered] * n
    assert all(r.sampling.n == 1 for r in moved)
    assert router.metric("migrations_total", reason="unavailable") == 1
    await victim.wait_until(lambda: not victim.state.running)
    await router.until(lambda: router.instance(victim).status is Status.DOWN)
    router.assert_nothing_held()


async def test_two_instances_die_one_after_the_other(world: World) -> None:
    decodes = await world.decodes(3)
    router = await world.cluster([], decodes)
    request, answer = make_request(max_tokens=12), Answer()
    stream = router.dispatcher.stream(request)
    for stop_at in (2, 5):
        for worker in decodes:
            worker.state.pause_after = stop_at
            worker.changed()
        await read(stream, answer, stop_at)
        victim = next(w for w in decodes if w.state.running)
        await victim.stop()
        await victim.wait_until(lambda victim=victim: not victim.state.running)  # type: ignore[misc]
    for worker in decodes:
        worker.state.pause_after = None
        worker.changed()
    async for chunk in stream:
        answer.add(chunk)
    assert_right(answer, request)
    assert answer.trace.num_migrations == 2
    router.assert_nothing_held()


@pytest.mark.parametrize("seed", [0, 1])
async def test_right_answers_while_instances_die_and_come_back(world: World, seed: int) -> None:
    rng = random.Random(seed)
    decodes = await world.decodes(3)
    router = await world.cluster([], decodes, max_retries=1000, retry_budget=1000.0)
    requests = [
        make_request(f"r{i}", prompt=[*range(i % 7, i % 7 + rng.randint(8, 40))], max_tokens=rng.randint(200, 900))
        for i in range(40)
    ]
    requests = [
        msgspec.structs.replace(r, sampling=r.sampling.replace(n=rng.choice([1, 1, 3]), seed=i))
        for i, r in enumerate(requests)
    ]
    jobs = [asyncio.create_task(run(router, r)) for r in requests]
    kills = 0
    while not all(job.done() for job in jobs) and kills < 25:
        victim = rng.choice(decodes)
        await asyncio.wait(jobs, timeout=rng.random() * 0.03)
        if victim.state.running:
            await victim.restart()
            kills += 1
    answers = await asyncio.gather(*jobs)
    for request, answer in zip(requests, answers, strict=True):
        assert_right(answer, request)
    assert sum(a.trace.num_migrations for a in answers) > 10
    router.assert_nothing_held()
    for worker in decodes:
        await worker.wait_until(lambda worker=worker: not worker.state.running)  # type: ignore[misc]


async def test_the_only_instance_restarts_in_mid_stream(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    decode.state.pause_after = 3
    request, answer = make_request(), Answer()
    stream = router.dispatcher.stream(request)
    await read(stream, answer, 3)
    decode.state.pause_after = None
    await decode.restart()
    async for chunk in stream:
        answer.add(chunk)
    assert_right(answer, request)
    router.assert_nothing_held()


async def test_a_hung_instance_is_found_out_by_probes(world: World) -> None:
    decodes = await world.decodes(2)
    proxies = {w.instance_id: await world.proxy(w) for w in decodes}
    router = await world.router(
        decode=tuple(f"127.0.0.1:{p.port}" for p in proxies.values()), probe_timeout_s=1.0, probe_failures=2
    )
    await router.ready(*decodes)
    for worker in decodes:
        worker.state.pause_after = 2
    request, answer = make_request(), Answer()
    stream = router.dispatcher.stream(request)
    await read(stream, answer, 2)
    victim = next(w for w in decodes if w.state.running)
    proxies[victim.instance_id].freeze()
    for worker in decodes:
        worker.state.pause_after = None
        worker.changed()
    async for chunk in stream:
        answer.add(chunk)
    assert_right(answer, request)
    assert router.metric("migrations_total", reason="lost") == 1
    router.assert_nothing_held()


async def test_decode_instances_hear_which_prefill_instances_are_silent(world: World) -> None:
    (decode,), prefills = await world.decodes(1), await world.prefills(2)
    proxy = await world.proxy(prefills[0])
    hung, well = f"127.0.0.1:{proxy.port}", prefills[1].address
    router = await world.router(
        prefill=(hung, well), decode=(decode.address,), probe_interval_s=0.2, probe_timeout_s=60.0
    )
    await router.ready(decode, *prefills)
    request = make_request()
    assert_right(await run(router, request), request)
    proxy.freeze()
    async with asyncio.timeout(240):
        while decode.state.silent_prefills != {hung}:
            await asyncio.sleep(0.01)
    # No new prompt is sent there, as long as there is another; a stream that is opened now hears of it too.
    await router.until(lambda: [x.address for x in router.registry.ready(Role.PREFILL)] == [well])
    await decode.restart()
    decode.state.silent_prefills = frozenset()
    request = make_request("again", prompt=[*range(30)])
    assert_right(await run(router, request), request)
    async with asyncio.timeout(240):
        while decode.state.silent_prefills != {hung}:
            await asyncio.sleep(0.01)
    proxy.thaw()
    async with asyncio.timeout(240):
        while decode.state.silent_prefills:
            await asyncio.sleep(0.01)
    await router.until(lambda: {x.address for x in router.registry.ready(Role.PREFILL)} == {hung, well})
    router.assert_nothing_held()


async def test_prompts_go_to_prefill_instances_whose_kv_can_be_read(world: World) -> None:
    decodes, prefills = await world.decodes(2), await world.prefills(2)
    router = await world.cluster(prefills, decodes, remote_prefill_threshold=1)
    for decode in decodes:
        decode.set_load(unreadable_prefills=[prefills[0].address])
    await router.until(lambda: all(router.instance(x).load.unreadable for x in decodes))
    for at in range(8):
        request = make_request(f"r{at}", prompt=[*range(40 * at, 40 * at + 40)])
        assert_right(await run(router, request), request)
    asked = [list(request.prefill_candidates) for decode in decodes for request in decode.state.requests]
    assert asked == [[prefills[1].address]] * 8
    # One that can read from no instance gets prompts without a prefill instance, if it gets any.
    everything = [x.address for x in prefills]
    for decode in decodes:
        decode.set_load(unreadable_prefills=everything)
    await router.until(lambda: all(len(router.instance(x).load.unreadable) == 2 for x in decodes))
    request = make_request("local", prompt=[*range(700, 740)])
    assert_right(await run(router, request), request)
    assert not any(x.prefill_candidates for y in decodes for x in y.state.requests if x.request_id == "local")
    for decode in decodes:
        decode.set_load(unreadable_prefills=[])
    await router.until(lambda: not any(router.instance(x).load.unreadable for x in decodes))
    request = make_request("back", prompt=[*range(800, 840)])
    assert_right(await run(router, request), request)
    (sent,) = (x for y in decodes for x in y.state.requests if x.request_id.endswith("back"))
    assert set(sent.prefill_candidates) == set(everything)
    router.assert_nothing_held()


@pytest.mark.parametrize("error", [InternalError("engine failed"), UnavailableError("shutting down")])
async def test_an_instance_that_gives_up_a_stream_is_replaced(world: World, error: Exception) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    for worker in decodes:
        worker.state.pause_after = 4
    request, answer = make_request(), Answer()
    stream = router.dispatcher.stream(request)
    await read(stream, answer, 4)
    victim = next(w for w in decodes if w.state.running)
    for worker in decodes:
        worker.state.pause_after = None
    victim.state.abort_all = error  # type: ignore[assignment]
    victim.changed()
    async for chunk in stream:
        answer.add(chunk)
    assert_right(answer, request)


async def test_a_stream_that_just_ends_is_not_taken_for_complete(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    decodes[0].state.silent_end = True
    for i in range(6):
        request = make_request(f"r{i}", prompt=[*range(i, i + 20)])
        assert_right(await run(router, request), request)
    assert decodes[0].state.requests, "the test never met the instance that ends early"


async def test_what_instances_cancel_themselves_is_no_cancellation_of_the_clients(world: World) -> None:
    workers = await world.decodes(2)
    router = await world.cluster([], workers)
    workers[0].state.refuse = CancelledError("the call was cancelled")  # as a server that is stopped says
    for number in range(4):
        assert await run(router, make_request(f"r{number}"))
    workers[1].state.refuse = workers[0].state.refuse
    with pytest.raises(UnavailableError, match="ended the call itself"):
        await run(router, make_request("last"))


async def test_a_request_that_fails_everywhere_ends_with_its_error(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    for worker in decodes:
        worker.state.abort_all = InternalError("poisoned")
    async with asyncio.timeout(200):  # it does not wait for others: nobody new could come
        with pytest.raises(InternalError, match="poisoned"):
            await run(router, make_request())
    assert [len(w.state.requests) for w in decodes] == [1, 1]
    assert router.metric("request_failures_total", code="internal") == 1
    router.assert_nothing_held()


@pytest.mark.parametrize("retries", [0, 3])
async def test_a_stream_whose_instances_are_all_dead_says_so(world: World, retries: int) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes, no_instance_wait_s=0.5, max_retries=retries)
    for worker in decodes:
        worker.state.pause_after = 3
    answer, stream = Answer(), router.dispatcher.stream(make_request())
    await read(stream, answer, 3)
    idle, busy = sorted(decodes, key=lambda worker: len(worker.state.running))
    await idle.stop()
    await router.until(lambda: not router.instance(idle).ready)
    await busy.stop()
    with pytest.raises(UnavailableError, match="no decode instance is left that could go on: ") as caught:
        await anext(stream)
    assert caught.value.retry_after_s
    router.assert_nothing_held()


async def test_retries_are_bounded(world: World) -> None:
    decodes = await world.decodes(4)
    router = await world.cluster([], decodes, max_retries=2)
    for worker in decodes:
        worker.state.abort_all = UnavailableError("no")
    with pytest.raises(UnavailableError, match="no"):
        await run(router, make_request())
    assert sum(len(w.state.requests) for w in decodes) == 3


async def test_a_wrong_request_is_not_tried_again(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    for worker in decodes:
        worker.state.refuse = InvalidRequestError("too long", field="prompt")
    with pytest.raises(InvalidRequestError) as caught:
        await run(router, make_request())
    assert caught.value.field == "prompt"
    assert router.metric("retries_total", reason="invalid_argument") == 0
    router.assert_nothing_held()


async def test_full_instances_pass_it_on_and_then_refuse(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    decodes[0].state.max_running = 0
    for i in range(4):
        answer = await run(router, make_request(f"r{i}", prompt=[*range(i, i + 20)]))
        assert answer.trace.decode_instance == "d1"
    decodes[1].state.max_running = 0
    with pytest.raises(QueueFullError) as caught:
        await run(router, make_request("last"))
    assert caught.value.retry_after_s == 2.0
    router.assert_nothing_held()


async def test_the_router_itself_is_bounded(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode], max_in_flight=1)
    decode.state.pause_after = 0
    first = router.dispatcher.stream(make_request("a"))
    reading = asyncio.ensure_future(anext(first))
    await decode.wait_until(lambda: bool(decode.state.running))
    with pytest.raises(QueueFullError):
        await run(router, make_request("b"))
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await first.aclose()
    router.assert_nothing_held()


async def test_deadline(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode], request_timeout_s=0.3)
    decode.state.pause_after = 2
    with pytest.raises(DeadlineError):
        await run(router, make_request())
    await decode.wait_until(lambda: not decode.state.running)
    router.assert_nothing_held()


@pytest.mark.parametrize("n", [1, 2])
async def test_closing_the_stream_cancels_at_once(world: World, n: int) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    decode.state.pause_after = 2
    stream = router.dispatcher.stream(make_request(n=n))
    await anext(stream)
    assert router.instance(decode).load.requests == n
    await stream.aclose()
    router.assert_nothing_held()
    await decode.wait_until(lambda: decode.state.cancelled == ["r"])
    assert router.metric("streams_closed_early_total") == 1


async def test_closing_a_migrated_stream_of_many_cancels_all(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    for worker in decodes:
        worker.state.pause_after = 2
    stream, answer = router.dispatcher.stream(make_request(n=3)), Answer()
    await read(stream, answer, 2)
    victim, other = sorted(decodes, key=lambda w: not w.state.running)
    other.state.pause_after = 3
    await victim.stop()
    answer.add(await anext(stream))
    await other.wait_until(lambda: len(other.state.running) == 3)
    await stream.aclose()
    await other.wait_until(lambda: len(other.state.cancelled) == 3)
    router.assert_nothing_held()


async def test_cancelling_the_reader_cancels_the_call(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    decode.state.pause_after = 0
    task = asyncio.create_task(run(router, make_request()))
    await decode.wait_until(lambda: bool(decode.state.running))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await decode.wait_until(lambda: decode.state.cancelled == ["r"])
    await router.until(lambda: router.dispatcher.num_in_flight == 0)
    router.assert_nothing_held()


async def test_cancel_and_migration_with_a_token(world: World) -> None:
    """Channels with interceptors have calls of another class."""
    decodes = await world.decodes(2, token=Token("secret"))
    router = await world.cluster([], decodes, token=Token("secret"))
    for worker in decodes:
        worker.state.pause_after = 2
    request, answer = make_request(), Answer()
    stream = router.dispatcher.stream(request)
    await read(stream, answer, 2)
    victim, other = sorted(decodes, key=lambda w: not w.state.running)
    other.state.pause_after = 5
    await victim.stop()
    await read(stream, answer, 5)
    assert answer.tokens[0] == expected_tokens(PROMPT, 5, seed=5)
    await stream.aclose()
    await other.wait_until(lambda: bool(other.state.cancelled))
    router.assert_nothing_held()


async def test_an_instance_that_ends_calls_by_a_deadline_of_its_own_is_left(world: World) -> None:
    """The router counts a request's time itself: an instance that says it is over has failed, and others have not."""
    wrong, right = await world.decodes(2)
    router = await world.cluster([], [wrong, right], breaker_failures=2)
    wrong.state.refuse = DeadlineError("too late")
    for at in range(8):
        request = make_request(f"r{at}", list(range(at, at + 32)))
        assert_right(await run(router, request), request)
    refused_at = [at for at in range(8) if f"r{at}~2" in {x.request_id for x in right.state.requests}]
    assert 1 <= len(refused_at) <= 2  # then its breaker is open
    router.assert_nothing_held()


class Babbler(FakeWorker):
    """A decode instance whose tokens are beyond its vocabulary, in messages of their own or among others'."""

    alone = True

    def _response(
        self,
        request: worker_pb2.GenerateRequest,
        outputs: list[list[int]],
        trace: common_pb2.RequestTrace | None,
        last: bool,
    ) -> worker_pb2.GenerateResponse:
        response = super()._response(request, outputs, trace, last)
        if self.alone == (trace is None):
            response.deltas[0].token_ids[0] = VOCAB_SIZE
        return response


@pytest.mark.parametrize("alone", [True, False])
async def test_tokens_beyond_the_vocabulary_are_a_fault_of_their_instance(world: World, alone: bool) -> None:
    wrong = Babbler(Role.DECODE, "wrong")
    wrong.alone = alone
    await wrong.start()
    world.stack.push_async_callback(wrong.stop)
    router = await world.cluster([], [wrong])
    with pytest.raises(InternalError, match="vocabulary"):
        await run(router, make_request())
    (right,) = await world.decodes(1)
    router.registry.register(registration(right))
    await router.ready(right)
    for at in range(3):
        request = make_request(f"r{at}")
        assert_right(await run(router, request), request)
    router.assert_nothing_held()
