"""Select and reserve without a network: what a placement holds, and that it all comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from baton.api.v1 import events_pb2
from baton.hashing import block_hashes, root_hash
from baton.testing.fake_worker import FINGERPRINT
from baton.types import Epoch, InstanceId, Role
from baton_router.config import RouterConfig
from baton_router.instance import Instance, InstanceInfo, Status
from baton_router.load import REQUEST_OVERHEAD_TOKENS
from baton_router.metrics import RouterMetrics
from baton_router.placement import Ask, Placer
from baton_router.policy import make_policy
from baton_router.registry import Registry

PROMPT = list(range(40))


class Cluster:
    """A registry whose instances are known without having been asked."""

    def __init__(self, threshold: int | None = None) -> None:
        self.metrics = RouterMetrics()
        config = RouterConfig(prefill=("p:1", "p:2"), decode=("d:1", "d:2"))
        self.registry = Registry(config, self.metrics, now=lambda: 0.0)
        self.registry.start()
        for task in self.registry._links.values():
            task.cancel()
        for x in self.registry.instances():
            x.info = InstanceInfo(
                InstanceId(x.address), x.role, Epoch(b"e" * 16), FINGERPRINT, 100, 1000, "m", "", 1000, frozenset()
            )
            x.status, x.generation = Status.READY, 1
        self.registry._reference = (FINGERPRINT, FINGERPRINT.content_key())
        policy = make_policy("match_minus_load", seed=0)
        self.placer = Placer(self.registry, policy, self.metrics, max_prefills=1, threshold=threshold)

    def get(self, address: str) -> Instance:
        return next(x for x in self.registry.instances() if x.address == address)

    def hold(self, address: str, tokens: list[int]) -> None:
        hashes = block_hashes(tokens, FINGERPRINT.block_size, root_hash(FINGERPRINT.content_key()))
        event = events_pb2.KvEvent(stored=events_pb2.KvBlocksStored(block_hashes=hashes))
        self.get(address).feed.apply(
            events_pb2.KvEventBatch(epoch=b"e" * 16, sequence=1, events=[event], snapshot=True)
        )

    def loads(self) -> dict[str, tuple[int, int]]:
        return {x.address: (x.load.requests, x.load.tokens) for x in self.registry.instances() if x.load.requests}


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.registry.close()


async def test_holds_of_a_placement(cluster: Cluster) -> None:
    cluster.hold("p:2", PROMPT[:24])
    cluster.hold("d:1", PROMPT[:8])
    placement = cluster.placer.place(Ask(PROMPT, num_sequences=2))
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
    assert not any(cluster.registry.index._expected.values())


async def test_a_short_rest_is_no_work_for_prefill(cluster: Cluster) -> None:
    cluster.placer = Placer(
        cluster.registry, make_policy("match_minus_load", seed=0), cluster.metrics, max_prefills=2, threshold=17
    )
    cluster.hold("d:2", PROMPT[:24])
    placement = cluster.placer.place(Ask(PROMPT))
    assert placement is not None
    assert placement.decode.address == "d:2"
    assert len(placement.prefill) == 2, "the worker decides; it gets its candidates all the same"
    assert cluster.loads() == {"d:2": (1, 40)}
    placement.release()


async def test_excluded_and_draining_instances_get_nothing(cluster: Cluster) -> None:
    one, two = cluster.get("d:1"), cluster.get("d:2")
    for _ in range(5):
        placement = cluster.placer.place(Ask(PROMPT, exclude={one.identity}), reserve=False)
        assert placement is not None
        assert placement.decode is two
    two.load.report.draining = True
    assert cluster.placer.place(Ask(PROMPT, exclude={one.identity})) is None
    one.generation += 1
    assert cluster.placer.place(Ask(PROMPT, exclude={("d:1", 1)}), reserve=False) is not None


async def test_concurrent_placements_see_each_other_at_once(cluster: Cluster) -> None:
    placements = [cluster.placer.place(Ask([i] * 40)) for i in range(10)]
    assert {x.address: x.load.requests for x in cluster.registry.ready(Role.DECODE)} == {"d:1": 5, "d:2": 5}
    assert {x.address: x.load.requests for x in cluster.registry.ready(Role.PREFILL)} == {"p:1": 5, "p:2": 5}
    assert cluster.get("d:1").load.work == 5 * (40 + REQUEST_OVERHEAD_TOKENS)
    for placement in placements:
        assert placement is not None
        placement.release()
    assert cluster.loads() == {}


async def test_a_restart_while_a_request_runs(cluster: Cluster) -> None:
    placement = cluster.placer.place(Ask(PROMPT))
    assert placement is not None
    cluster.hold(placement.decode.address, PROMPT)
    placement.decode.feed.restarted(Epoch(b"f" * 16))
    placement.release()
    assert cluster.loads() == {}
    assert not any(cluster.registry.index._expected.values())


async def test_no_decode_instance(cluster: Cluster) -> None:
    for x in cluster.registry.ready(Role.DECODE):
        x.status = Status.DOWN
    assert cluster.placer.place(Ask(PROMPT)) is None
