"""Where the router sends requests, over real sockets: to the KV, past the load, by tenant."""

from __future__ import annotations

import asyncio

import msgspec
from tests.support.router.world import PROMPT, World, assert_right, make_request, run

from baton.api.v1 import common_pb2


async def test_goes_where_the_kv_is(world: World) -> None:
    prefills, decodes = await world.prefills(2), await world.decodes(3)
    router = await world.cluster(prefills, decodes)
    decodes[2].store(PROMPT)
    prefills[1].store(PROMPT[:16])
    await router.until(lambda: router.instance(decodes[2]).events.num_blocks == 8)
    await router.until(lambda: router.instance(prefills[1]).events.num_blocks == 4)

    answer = await run(router, make_request())

    assert_right(answer, make_request())
    decision = answer.chunks[0].decision
    assert decision is not None
    assert (decision.prefill_instance, decision.decode_instance) == ("p1", "d2")
    assert list(decision.prefill_addresses) == [prefills[1].address, prefills[0].address]
    assert list(decodes[2].state.requests[0].prefill_candidates) == list(decision.prefill_addresses)
    assert decision.index_state == "exact"
    rates = {c.instance_id: c.match_rate for c in decision.candidates}
    assert rates == {"p0": 0.0, "p1": 0.5, "d0": 0.0, "d1": 0.0, "d2": 1.0}
    assert router.metric("decisions_total", policy="match_minus_load") == 1
    assert router.metric("prefill_path_total", path="remote", pipe="tcp", reason="") == 1
    router.assert_nothing_held()


async def test_route_says_the_same_and_reserves_nothing(world: World) -> None:
    prefills, decodes = await world.prefills(1), await world.decodes(2)
    router = await world.cluster(prefills, decodes)
    decodes[1].store(PROMPT)
    await router.until(lambda: router.instance(decodes[1]).events.num_blocks == 8)
    decision = await router.dispatcher.route(make_request())
    assert decision.decode_instance == "d1"
    router.assert_nothing_held()
    assert decodes[1].state.requests == []


async def test_route_knows_that_prompt_logprobs_are_computed_by_decode(world: World) -> None:
    prefills, decodes = await world.prefills(1), await world.decodes(1)
    router = await world.cluster(prefills, decodes)
    assert (await router.dispatcher.route(make_request())).prefill_instance
    request = make_request(prompt_logprobs=0)
    assert not (await router.dispatcher.route(request)).prefill_instance
    answer = await run(router, request)
    assert answer.chunks[0].decision is not None
    assert not answer.chunks[0].decision.prefill_instance


async def test_tenants_do_not_share_matches(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    decodes[0].store(PROMPT, "tenant a")
    await router.until(lambda: router.instance(decodes[0]).events.num_blocks == 8)
    for salt, rate in (("tenant a", 1.0), ("tenant b", 0.0), ("", 0.0)):
        decision = await router.dispatcher.route(msgspec.structs.replace(make_request(), cache_salt=salt))
        assert max(c.match_rate for c in decision.candidates) == rate


async def test_a_burst_of_one_prompt_counts_before_events_confirm_it(world: World) -> None:
    decodes = await world.decodes(2, caches=False)
    router = await world.cluster([], decodes)
    for worker in decodes:
        worker.state.pause_after = 0
    first = router.dispatcher.stream(make_request("a"))
    reading = asyncio.ensure_future(anext(first))
    await router.until(lambda: any(w.state.running for w in decodes))
    where = next(w for w in decodes if w.state.running)
    decision = await router.dispatcher.route(make_request("b"))
    rates = {c.instance_id: c.match_rate for c in decision.candidates}
    assert rates.pop(where.instance_id) == 1.0
    assert set(rates.values()) == {0.0}
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await first.aclose()
    decision = await router.dispatcher.route(make_request("b"))
    assert {c.match_rate for c in decision.candidates} == {0.0}


async def test_without_prefill_instances_none_are_named(world: World) -> None:
    decodes = await world.decodes(1)
    router = await world.cluster([], decodes, remote_prefill_threshold=77)
    answer = await run(router, make_request())
    assert list(decodes[0].state.requests[0].prefill_candidates) == []
    assert decodes[0].state.requests[0].remote_prefill_threshold == 77
    assert answer.trace.path == common_pb2.PREFILL_PATH_LOCAL


async def test_prompt_logprobs_are_computed_where_they_are_wanted(world: World) -> None:
    prefills, decodes = await world.prefills(1), await world.decodes(1)
    router = await world.cluster(prefills, decodes)
    await run(router, make_request(prompt_logprobs=1))
    assert list(decodes[0].state.requests[0].prefill_candidates) == []


async def test_load_of_others_is_seen(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    decodes[0].set_load(num_running=10, blocks_active=500)
    await router.until(lambda: router.instance(decodes[0]).load.foreign > 0)
    for i in range(5):
        decision = await router.dispatcher.route(make_request(f"r{i}"))
        assert decision.decode_instance == "d1"
