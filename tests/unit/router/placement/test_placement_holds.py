"""Select and reserve without a network: what a placement holds, and that it all comes back."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.support.router.placement_cluster import PROMPT, Cluster, nothing_expected
from tests.support.servers.fake_worker import FINGERPRINT

from baton.api.v1 import common_pb2
from baton.types import Epoch, Role
from baton_router.registry.instance import Status
from baton_router.registry.load import REQUEST_OVERHEAD_TOKENS
from baton_router.scheduler.placement import PlacementRequest
from baton_router.scheduler.roster import Candidates


async def test_holds_of_a_placement(cluster: Cluster) -> None:
    cluster.hold("p:2", PROMPT[:24])
    cluster.hold("d:1", PROMPT[:8])
    placement = cluster.placer.place(PlacementRequest(PROMPT, num_sequences=2))
    assert placement is not None
    assert placement.decision.prefill_addresses == ["p:2"]
    assert cluster.loads() == {"p:2": (1, 16), "d:1": (2, 40)}
    placement.grow(5)
    assert cluster.loads()["d:1"] == (2, 45)
    placement.prefilled()
    placement.prefilled()
    assert cluster.loads() == {"d:1": (2, 45)}
    placement.release()
    placement.release()
    placement.grow(1)
    assert cluster.loads() == {}
    cluster.settle()
    assert nothing_expected(cluster)


async def test_a_computed_prompt_counts_until_events_must_have_told_of_it(cluster: Cluster) -> None:
    """Instances gather events, also beyond a request's end: in between nobody else says that its blocks are there."""
    for address in ("p:1", "p:2", "d:1", "d:2"):
        cluster.hold(address, [])

    def expected() -> int:
        for x in cluster.registry.instances():
            x.events.tick()
        return sum(cluster.registry.index.num_pending(x.events.slot) for x in cluster.registry.instances())

    def serve(*, computed: bool) -> None:
        placement = cluster.placer.place(PlacementRequest(PROMPT))
        assert placement is not None
        assert expected() >= len(PROMPT) // FINGERPRINT.block_size, "on the prefill instance"
        if computed:
            placement.prefilled()
            assert expected() >= 2 * len(PROMPT) // FINGERPRINT.block_size, "on both"
        placement.release()
        placement.release()

    serve(computed=False)
    assert nothing_expected(cluster)
    serve(computed=True)
    cluster.now = 0.8
    blocks = expected()
    assert blocks == 2 * (len(PROMPT) // FINGERPRINT.block_size)
    cluster.now = 0.95
    assert expected() == 0
    serve(computed=True)
    for x in cluster.registry.instances():
        x.events.restarted(Epoch(b"another"))
    assert nothing_expected(cluster)
    for address in ("p:1", "p:2", "d:1", "d:2"):
        cluster.hold(address, [])
    serve(computed=True)
    for x in cluster.registry.instances():
        x.events.close()
    assert cluster.registry.index._pending._root.children == {}


async def test_a_short_rest_is_no_work_for_prefill(cluster: Cluster) -> None:
    cluster.placer = cluster.make_placer(max_prefills=2, threshold=17)
    cluster.hold("d:2", PROMPT[:24])
    placement = cluster.placer.place(PlacementRequest(PROMPT))
    assert placement is not None
    assert placement.decode.address == "d:2"
    assert len(placement.prefill) == 2, "the worker decides; it gets its candidates all the same"
    assert cluster.loads() == {"d:2": (1, 40)}
    placement.release()


async def test_excluded_and_draining_instances_get_nothing(cluster: Cluster) -> None:
    one, two = cluster.get("d:1"), cluster.get("d:2")
    for _ in range(5):
        placement = cluster.placer.place(PlacementRequest(PROMPT, exclude={one.identity}), reserve=False)
        assert placement is not None
        assert placement.decode is two
    two.load.observe(common_pb2.LoadReport(draining=True), 4)
    cluster.registry._changed()  # as the link says that took the report
    assert cluster.placer.place(PlacementRequest(PROMPT, exclude={one.identity})) is None
    one.generation += 1
    assert cluster.placer.place(PlacementRequest(PROMPT, exclude={("d:1", 1)}), reserve=False) is not None


async def test_concurrent_placements_see_each_other_at_once(cluster: Cluster) -> None:
    placements = [cluster.placer.place(PlacementRequest([i] * 40)) for i in range(10)]
    assert {x.address: x.load.requests for x in cluster.registry.ready(Role.DECODE)} == {"d:1": 5, "d:2": 5}
    assert {x.address: x.load.requests for x in cluster.registry.ready(Role.PREFILL)} == {"p:1": 5, "p:2": 5}
    assert cluster.get("d:1").load.work == 5 * (40 + REQUEST_OVERHEAD_TOKENS)
    for placement in placements:
        assert placement is not None
        placement.release()
    assert cluster.loads() == {}


async def test_a_restart_while_a_request_runs(cluster: Cluster) -> None:
    placement = cluster.placer.place(PlacementRequest(PROMPT))
    assert placement is not None
    cluster.hold(placement.decode.address, PROMPT)
    placement.decode.events.restarted(Epoch(b"f" * 16))
    placement.release()
    assert cluster.loads() == {}
    assert nothing_expected(cluster)


async def test_no_decode_instance(cluster: Cluster) -> None:
    cluster.set_down(*cluster.registry.ready(Role.DECODE))
    assert cluster.placer.place(PlacementRequest(PROMPT)) is None


async def test_a_request_of_more_sequences_than_the_routers_part_is_placed(cluster: Cluster) -> None:
    one, two = cluster.get("d:1"), cluster.get("d:2")
    one.load.limit = two.load.limit = 4
    large = cluster.placer.place(PlacementRequest(PROMPT, num_sequences=6))
    assert large is not None
    assert cluster.placer.place(PlacementRequest(PROMPT, num_sequences=3)) is not None
    other = two if large.decode is one else one
    assert other.load.requests == 3, "what follows goes elsewhere"
    another = cluster.placer.place(PlacementRequest(PROMPT, num_sequences=5))
    assert another is not None
    assert another.decode is other, "there is room for one: it needs not wait until there is nothing else"
    assert cluster.placer.place(PlacementRequest(PROMPT)) is None, "more than the parts waits"
    large.release()
    assert cluster.placer.place(PlacementRequest(PROMPT, num_sequences=4)) is not None
    one.load.limit = two.load.limit = 0
    for x in (one, two):
        x.load.requests = 0
    assert cluster.placer.place(PlacementRequest(PROMPT, num_sequences=6)) is None, "no part, no request"


# --- what is kept between requests ---


async def test_a_full_instance_costs_no_new_roster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(Candidates):
        def __init__(self, *args: Any) -> None:
            made.append(1)
            super().__init__(*args)

    monkeypatch.setattr("baton_router.scheduler.placer.Candidates", Counted)
    cluster.get("d:1").load.limit = 0
    placed = [cluster.placer.place(PlacementRequest(PROMPT)) for _ in range(5)]
    assert [x.decode.address for x in placed if x is not None] == ["d:2"] * 5
    assert len(made) == 1
    cluster.set_down(cluster.get("p:1"))
    assert cluster.placer.place(PlacementRequest(PROMPT)) is not None
    assert len(made) == 2, "an instance has gone"


async def test_what_is_kept_is_what_a_new_placer_would_see(cluster: Cluster) -> None:
    """Two placers in turns over the same instances, whose load, room and health change all the time."""
    rng, held = random.Random(5), []
    placers = [cluster.placer, cluster.make_placer(seed=0)]
    for step in range(300):
        cluster.now += 0.01
        for x in cluster.registry.instances():
            x.load.limit = rng.choice((0, 1, 2, 2**62)) if x.role is Role.DECODE else x.load.limit
            x.load.observe(common_pb2.LoadReport(waiting_prompt_tokens=rng.randrange(1000)), 4)
        if step % 20 == 0:
            x = rng.choice(cluster.registry.instances())
            x.status = Status.DOWN if x.status is Status.READY else Status.READY
            cluster.registry._changed()
        exclude = [cluster.get("d:2").identity] if rng.random() < 0.2 else []
        ask = PlacementRequest(PROMPT, exclude=exclude, local_only=rng.random() < 0.2)
        seen = [x.place(ask, reserve=False) for x in (rng.choice(placers), cluster.make_placer())]
        assert [x is None for x in seen] in ([True, True], [False, False])
        if seen[0] is not None and seen[1] is not None:
            kept, new = ([(c[0], c[2], c[4]) for c in x.decision.candidates] for x in seen if x is not None)
            assert [c[:2] for c in kept] == [c[:2] for c in new]
            assert [c[2] for c in kept] == pytest.approx([c[2] for c in new], rel=1e-9)
        placement = rng.choice(placers).place(ask)
        if placement is not None:
            assert placement.decode.identity not in exclude
            placement.grow(3)
            held.append(placement)
        if len(held) > 2:
            held.pop(rng.randrange(3)).release()
    for placement in held:
        placement.release()
    assert cluster.loads() == {}
