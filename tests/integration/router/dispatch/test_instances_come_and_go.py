"""Instances that register, drain, move, hang, or are refused, over real sockets."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from tests.support.router.world import (
    PROMPT,
    Answer,
    World,
    assert_right,
    make_request,
    read,
    registration,
    run,
)
from tests.support.servers.fake_worker import FINGERPRINT

from baton.api.v1 import common_pb2, router_pb2
from baton.errors import (
    InvalidRequestError,
    UnavailableError,
)
from baton.rpc.service_token import Token
from baton.types import Role
from baton_router.registry.instance import Status


async def test_a_draining_instance_gets_nothing_new(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes)
    decodes[0].state.pause_after = decodes[1].state.pause_after = 1
    request, answer = make_request("running"), Answer()
    stream = router.dispatcher.stream(request)
    answer.add(await anext(stream))
    draining, other = sorted(decodes, key=lambda w: not w.state.running)
    draining.set_load(draining=True)
    await router.until(lambda: not router.instance(draining).ready)
    for worker in decodes:
        worker.state.pause_after = None
        worker.changed()
    for i in range(3):
        assert (await run(router, make_request(f"r{i}"))).trace.decode_instance == other.instance_id
    async for chunk in stream:
        answer.add(chunk)
    assert_right(answer, request)
    assert answer.trace.decode_instance == draining.instance_id, "a draining instance ends what it has begun"


async def test_requests_wait_for_the_first_instance(world: World) -> None:
    router = await world.router()
    with pytest.raises(UnavailableError):
        router.dispatcher.model_info()
    waiting = asyncio.create_task(run(router, make_request()))
    (decode,) = await world.decodes(1)
    router.registry.register(registration(decode))
    assert_right(await waiting, make_request())
    assert router.dispatcher.model_info().vocab_size == 1000


async def test_nobody_comes(world: World) -> None:
    router = await world.router(no_instance_wait_s=0.1)
    with pytest.raises(UnavailableError) as caught:
        await run(router, make_request())
    assert caught.value.retry_after_s
    router.assert_nothing_held()


async def test_lease(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.router(lease_ttl_s=10.0)
    lease = router.registry.register(registration(decode))
    assert lease.ttl_ms == 10_000
    await router.ready(decode)
    router.clock.now += 9
    assert router.registry.heartbeat(lease.lease_id)
    router.clock.now += 9
    router.registry.expire()
    assert router.registry.ready(Role.DECODE)
    router.clock.now += 2
    assert not router.registry.heartbeat(lease.lease_id)
    await router.until(lambda: router.registry.instances() == [])
    assert router.metric("registrations_total", change="expired") == 1
    again = router.registry.register(registration(decode))
    await router.ready(decode)
    router.registry.deregister(again.lease_id)
    assert router.registry.instances() == []
    router.registry.deregister(again.lease_id)
    await router.until(lambda: len(router.registry.index) == 0)


async def test_nobody_loses_a_lease_for_a_standstill_of_the_router(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.router(lease_ttl_s=0.8)
    router.registry.register(registration(decode))
    await router.ready(decode)
    time.sleep(1.5)  # noqa: ASYNC251 - nothing of this process runs, as after SIGSTOP or under far too much load
    router.clock.now += 1.2
    await asyncio.sleep(0.4)  # it looks for leases that have ended, and would end this one
    assert router.registry.ready(Role.DECODE)
    router.clock.now += 1000
    await router.until(lambda: router.registry.instances() == [])  # and the lease still ends


async def test_a_running_request_outlives_its_instances_registration(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.router()
    lease = router.registry.register(registration(decode))
    await router.ready(decode)
    decode.state.pause_after = 2
    request, answer = make_request(), Answer()
    stream = router.dispatcher.stream(request)
    answer.add(await anext(stream))
    router.registry.deregister(lease.lease_id)
    decode.state.pause_after = None
    decode.changed()
    async for chunk in stream:
        answer.add(chunk)
    assert_right(answer, request)
    await router.until(lambda: not router.registry._retired)


@pytest.mark.parametrize("expires", [True, False])
async def test_an_instance_that_left_and_hangs_keeps_no_request(world: World, expires: bool) -> None:
    """Leases may run out before enough probes are missed; nobody probed the instance then, and its streams stood."""
    decodes = await world.decodes(2)
    router = await world.router(lease_ttl_s=10.0, probe_timeout_s=1.0)
    proxies = {w.instance_id: await world.proxy(w) for w in decodes}
    leases = {}
    for worker in decodes:
        message = registration(worker)
        message.address = f"127.0.0.1:{proxies[worker.instance_id].port}"
        leases[worker.instance_id] = router.registry.register(message)
        worker.state.pause_after = 2
    await router.ready(*decodes)
    request, answer = make_request(), Answer()
    stream = router.dispatcher.stream(request)
    await read(stream, answer, 2)
    victim, other = sorted(decodes, key=lambda w: not w.state.running)
    proxies[victim.instance_id].freeze()
    if expires:
        router.clock.now += 9
        router.registry.heartbeat(leases[other.instance_id].lease_id)
        router.clock.now += 2
    else:
        router.registry.deregister(leases[victim.instance_id].lease_id)
    await router.until(lambda: [x.instance_id for x in router.registry.instances()] == [other.instance_id])
    other.state.pause_after = None
    async with asyncio.timeout(240):
        async for chunk in stream:
            answer.add(chunk)
    assert_right(answer, request)
    assert router.metric("migrations_total", reason="lost") == 1
    await router.until(lambda: not router.registry._retired)
    router.assert_nothing_held()


async def test_an_instance_moves_to_another_port(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.router()
    router.registry.register(registration(decode))
    await router.ready(decode)
    await decode.stop()
    await decode.start()
    router.registry.register(registration(decode))  # the same process: its epoch says so
    assert [x.address for x in router.registry.instances()] == [decode.address]
    await router.ready(decode)


async def test_two_live_instances_cannot_have_one_name(world: World) -> None:
    first, second = await world.worker(Role.DECODE, "d"), await world.worker(Role.DECODE, "d")
    router = await world.router()
    lease = router.registry.register(registration(first))
    await router.ready(first)
    with pytest.raises(InvalidRequestError, match=first.address) as caught:
        router.registry.register(registration(second))
    assert caught.value.field == "instance_id"
    assert router.registry.heartbeat(lease.lease_id)
    await first.stop()
    await router.until(lambda: not router.registry.ready(Role.DECODE))
    router.registry.register(registration(second))
    await router.ready(second)
    assert [x.address for x in router.registry.instances()] == [second.address]


async def test_a_static_instance_that_registers_under_another_name_is_one_instance(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.router(decode=(f"localhost:{decode.port}",))
    await router.ready(decode)
    lease = router.registry.register(registration(decode))
    assert [x.address for x in router.registry.instances()] == [f"localhost:{decode.port}"]
    router.clock.now += 100
    router.registry.expire()
    assert not router.registry.heartbeat(lease.lease_id)
    assert router.registry.ready(Role.DECODE), "a static instance needs no lease"


@pytest.mark.parametrize(
    ("changes", "field_name"),
    [({"address": "nowhere"}, "address"), ({"instance_id": ""}, "instance_id"), ({"role": 0}, "role")],
)
async def test_bad_registrations(world: World, changes: dict[str, object], field_name: str) -> None:
    router = await world.router()
    message = router_pb2.RegisterRequest(address="127.0.0.1:1", instance_id="x", role=common_pb2.ROLE_DECODE)
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(InvalidRequestError) as caught:
        router.registry.register(message)
    assert caught.value.field == field_name


async def test_other_kv_is_refused_until_the_others_are_gone(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    other = await world.worker(Role.DECODE, "other", fingerprint=replace(FINGERPRINT, kv_dtype="bfloat16"))
    lease = router.registry.register(registration(other))
    await router.until(lambda: any(x.status is Status.REFUSED for x in router.registry.instances()))
    refused = next(x for x in router.registry.instances() if x.status is Status.REFUSED)
    assert "kv_dtype" in refused.reason
    assert not refused.describe().healthy
    assert router.metric("instance_refusals_total", field="kv_dtype") == 1
    assert [x.instance_id for x in router.registry.ready(Role.DECODE)] == ["d0"]
    await decode.stop()
    await router.until(lambda: [x.instance_id for x in router.registry.ready(Role.DECODE)] == ["other"])
    assert_right(await run(router, make_request()), make_request())
    assert router.registry.heartbeat(lease.lease_id)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 8, "block_bytes": 256},
        {"tp_size": 2},
        {"pp_size": 2},
        {"block_size": 2, "block_bytes": 64, "tp_size": 2, "pp_size": 2},
    ],
)
async def test_instances_of_another_shape_serve_together(world: World, changes: dict[str, int]) -> None:
    """Blocks may be cut otherwise; a stream goes on where they are, and each index knows its own."""
    prefills, (first,) = await world.prefills(1), await world.decodes(1)
    other = await world.worker(Role.DECODE, "other", fingerprint=replace(FINGERPRINT, **changes))  # type: ignore[arg-type]
    router = await world.cluster(prefills, [first, other])
    for worker in (first, other, *prefills):
        worker.store(PROMPT[:16])
        num_blocks = 16 // worker.fingerprint.block_size
        await router.until(lambda x=worker, n=num_blocks: router.instance(x).events.num_blocks == n)  # type: ignore[misc]
    decision = await router.dispatcher.route(make_request())
    assert {c.match_rate for c in decision.candidates} == {0.5}
    first.state.pause_after = other.state.pause_after = 3
    running = asyncio.create_task(run(router, make_request()))
    await router.until(lambda: bool(first.state.running or other.state.running))
    owner, rest = (first, other) if first.state.running else (other, first)
    rest.state.pause_after = None
    await owner.stop()
    answer = await running
    assert_right(answer, make_request())
    assert answer.trace.decode_instance == rest.instance_id
    router.assert_nothing_held()


@pytest.mark.parametrize("field_name", ["model_digest", "adapter", "kv_scales", "rope", "hash_scheme"])
async def test_other_content_is_refused_by_name(world: World, field_name: str) -> None:
    decodes = await world.decodes(1)
    router = await world.cluster([], decodes)
    changes = {field_name: "other", "block_size": 8, "tp_size": 2}
    other = await world.worker(Role.PREFILL, "other", fingerprint=replace(FINGERPRINT, **changes))  # type: ignore[arg-type]
    router.registry.register(registration(other))
    await router.until(lambda: router.metric("instance_refusals_total", field=field_name) == 1)
    (refused,) = [x for x in router.registry.instances() if x.status is Status.REFUSED]
    assert f"differs in {field_name}" in refused.reason


async def test_the_longest_request_fits_on_whoever_may_get_it(world: World) -> None:
    decodes = await world.decodes(2)
    decodes[1].state.max_model_len = 100
    router = await world.cluster([], decodes)
    assert router.dispatcher.model_info().max_model_len == 100
    await decodes[1].stop()
    await router.until(lambda: len(router.registry.ready(Role.DECODE)) == 1)
    assert router.dispatcher.model_info().max_model_len == 4096


async def test_another_role_than_promised_is_refused(world: World) -> None:
    (prefill,) = await world.prefills(1)
    router = await world.router(decode=(prefill.address,))
    await router.until(lambda: any(x.status is Status.REFUSED for x in router.registry.instances()))
    assert router.metric("instance_refusals_total", field="role") == 1


async def test_token(world: World) -> None:
    decode = await world.worker(Role.DECODE, "d0", token=Token("secret"))
    good = await world.router(token=Token("secret"), decode=(decode.address,))
    await good.ready(decode)
    assert_right(await run(good, make_request()), make_request())
    bad = await world.router(token=Token("wrong"), decode=(decode.address,), no_instance_wait_s=0.1)
    await bad.until(lambda: bad.registry.instances()[0].status is Status.REFUSED)
    assert "another token" in bad.registry.instances()[0].describe().refused
    with pytest.raises(UnavailableError):
        await run(bad, make_request())
