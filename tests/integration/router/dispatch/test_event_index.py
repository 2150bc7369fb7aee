"""The router's index follows the events of its instances, over real sockets."""

from __future__ import annotations

import asyncio

from prometheus_client import generate_latest
from tests.support.router.world import PROMPT, World, assert_right, make_request, run

from baton.types import Role
from baton_router.indexer.events import IndexState


async def test_gap_in_the_events(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    decode.store(PROMPT[:16])
    feed = router.instance(decode).events
    await router.until(lambda: feed.num_blocks == 4)
    decode.state.mute_events = True
    decode.store(PROMPT[:24])
    before = len(decode.state.event_subscriptions)
    await router.until(lambda: decode.state.event_position == 2)
    decode.state.mute_events = False
    decode.store(PROMPT)
    await router.until(lambda: feed.num_blocks == 8)
    assert feed.num_gaps == 1
    assert feed.state is IndexState.EXACT
    assert decode.state.event_subscriptions[before:] == [1], "it asked for the batch it had last"
    assert router.metric("index_sequence_gaps_total", instance="d0") == 1


async def test_gap_longer_than_the_history(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    feed = router.instance(decode).events
    for end in (8, 16):
        decode.store(PROMPT[:end])
    await router.until(lambda: feed.num_blocks == 4)
    decode.evict(decode.hashes(PROMPT)[3:4])
    decode.forget_history()
    decode.store(PROMPT)
    await router.until(lambda: feed.state is IndexState.EXACT and feed.num_blocks == 8)
    decision = await router.dispatcher.route(make_request())
    assert decision.candidates[0].match_rate == 1.0


async def test_restart_forgets_the_cache(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    decodes[0].store(PROMPT)
    await router.until(lambda: router.instance(decodes[0]).events.num_blocks == 8)
    old = router.instance(decodes[0]).generation
    await decodes[0].restart()
    await router.until(lambda: router.instance(decodes[0]).generation > old)
    await router.ready(*decodes)
    decision = await router.dispatcher.route(make_request())
    assert {c.match_rate for c in decision.candidates} == {0.0}


async def test_a_stale_index_is_used_for_a_while(world: World) -> None:
    (decode,) = await world.decodes(1)
    proxy = await world.proxy(decode)
    router = await world.router(decode=(f"127.0.0.1:{proxy.port}",), index_stale_limit_s=30.0)
    await router.ready(decode)
    decode.store(PROMPT)
    feed = router.instance(decode).events
    await router.until(lambda: feed.num_blocks == 8)
    await proxy.cut()
    await router.until(lambda: feed.state is IndexState.STALE)
    router.clock.now += 20
    assert feed.state is IndexState.STALE
    assert feed.age_s == 20
    assert feed.usable
    router.clock.now += 20
    assert feed.state is IndexState.OFF
    assert not feed.usable
    await proxy.start()
    await router.until(lambda: feed.state is IndexState.EXACT)
    assert feed.num_blocks == 8


async def test_eviction_and_clear(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    feed = router.instance(decode).events
    decode.store(PROMPT)
    decode.evict(decode.hashes(PROMPT)[6:])
    await router.until(lambda: feed.num_blocks == 6)
    assert (await router.dispatcher.route(make_request())).candidates[0].match_rate == 0.75
    decode.clear()
    await router.until(lambda: feed.num_blocks == 0)


async def test_events_switched_off(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.router(decode=(decode.address,), kv_events=False)
    await router.until(lambda: bool(router.registry.ready(Role.DECODE)))
    answer = await run(router, make_request())
    decision = answer.chunks[0].decision
    assert decision is not None
    assert decision.index_state == "off"
    assert decode.state.event_subscriptions == []


async def test_two_routers_side_by_side(world: World) -> None:
    prefills, decodes = await world.prefills(1), await world.decodes(2)
    routers = [await world.cluster(prefills, decodes) for _ in range(2)]
    requests = [make_request(f"r{i}", prompt=[*range(i, i + 24)], max_tokens=6) for i in range(16)]
    answers = await asyncio.gather(*(run(routers[i % 2], r) for i, r in enumerate(requests)))
    for request, answer in zip(requests, answers, strict=True):
        assert_right(answer, request)
    for router in routers:
        await router.until(lambda r=router: all(r.instance(w).events.num_blocks == len(w.cached) for w in decodes))  # type: ignore[misc]
    one, two = [await r.dispatcher.route(requests[3]) for r in routers]
    assert {c.instance_id: c.match_rate for c in one.candidates} == {
        c.instance_id: c.match_rate for c in two.candidates
    }
    assert max(c.match_rate for c in one.candidates) == 1.0
    for router in routers:
        router.assert_nothing_held()


async def test_metrics_render(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    await run(router, make_request())
    text = generate_latest(router.metrics).decode()
    assert 'baton_router_index_state{instance="d0",role="decode",state="exact"} 1.0' in text
    assert 'baton_router_instance_healthy{instance="d1",role="decode"} 1.0' in text
    assert "baton_router_match_rate_bucket" in text
