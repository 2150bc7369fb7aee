"""Placement over instances whose blocks differ in size, and over such whose KV has another dtype."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.support.router.placement_cluster import PROMPT, Cluster, nothing_expected
from tests.support.servers.fake_worker import FINGERPRINT

from baton.hashing import hash_chain
from baton.kv_cache.fingerprint import Fingerprint
from baton.types import InstanceId, PrefillPath
from baton_router.scheduler.placement import PlacementRequest

EIGHTS = replace(FINGERPRINT, block_size=8, block_bytes=256)


async def test_match_rates_are_in_tokens_whatever_the_blocks() -> None:
    cluster = Cluster(p2=EIGHTS, d2=EIGHTS)
    for address in ("p:1", "p:2", "d:1", "d:2"):
        cluster.hold(address, PROMPT[:24])
    placement = cluster.placer.place(PlacementRequest(PROMPT), reserve=False)
    assert placement is not None
    assert {x.instance_id: x.match_rate for x in placement.decision.candidates} == dict.fromkeys(
        ("p:1", "p:2", "d:1", "d:2"), 24 / 40
    )
    # 36 of 40 tokens in fours beat 32 in eights, and 32 in eights beat 28 in fours.
    for fours, best in ((36, "d:1"), (28, "d:2")):
        cluster.hold("d:1", PROMPT[:fours])
        cluster.hold("d:2", PROMPT[:32])
        placement = cluster.placer.place(PlacementRequest(PROMPT), reserve=False)
        assert placement is not None
        assert placement.decode.address == best
    await cluster.registry.close()


async def test_holds_and_expectations_are_made_of_the_instances_own_blocks() -> None:
    cluster = Cluster(d1=EIGHTS, d2=EIGHTS)
    cluster.hold("d:1", PROMPT[:16])
    cluster.hold("p:2", PROMPT[:20])
    placement = cluster.placer.place(PlacementRequest(PROMPT))
    assert placement is not None
    assert (placement.decode.address, placement.prefill[0].address) == ("d:1", "p:2")
    assert cluster.loads() == {"d:1": (1, 40), "p:2": (1, 20)}
    index = cluster.registry.index
    assert index.num_pending(cluster.get("d:1").events.slot) == 0, "the KV is not there yet"
    assert index.num_pending(cluster.get("p:2").events.slot) == 10, "blocks of four"
    placement.prefilled()
    assert index.num_pending(cluster.get("d:1").events.slot) == 5, "blocks of eight"
    again = cluster.placer.place(PlacementRequest(PROMPT), reserve=False)
    assert again is not None
    rates = {x.instance_id: x.match_rate for x in again.decision.candidates}
    assert rates == {"p:1": 0.0, "p:2": 1.0, "d:1": 1.0, "d:2": 0.0}
    placement.release()
    cluster.settle()
    assert nothing_expected(cluster)
    await cluster.registry.close()


async def test_the_threshold_compares_tokens() -> None:
    cluster = Cluster(threshold=9, d1=EIGHTS, d2=EIGHTS)
    cluster.hold("d:2", PROMPT[:32])
    placement = cluster.placer.place(PlacementRequest(PROMPT))
    assert placement is not None
    assert cluster.loads() == {"d:2": (1, 40)}, "8 tokens are missing: decode prefills by itself"
    placement.release()
    await cluster.registry.close()


@pytest.mark.parametrize(
    ("fingerprints", "chains"),
    [
        ({}, 1),
        ({"d1": replace(FINGERPRINT, tp_size=2), "p2": replace(FINGERPRINT, pp_size=2)}, 1),
        ({"p1": EIGHTS, "d2": EIGHTS}, 2),
        ({"p1": EIGHTS, "d2": replace(FINGERPRINT, block_size=16)}, 3),
    ],
)
async def test_a_prompt_is_hashed_once_per_block_size(
    monkeypatch: pytest.MonkeyPatch, fingerprints: dict[str, Fingerprint], chains: int
) -> None:
    cluster, calls = Cluster(**fingerprints), []

    def counted(*args: Any) -> Any:
        calls.append(args[1])
        return hash_chain(*args)

    monkeypatch.setattr("baton_router.scheduler.placer.hash_chain", counted)
    assert cluster.placer.place(PlacementRequest(PROMPT), reserve=False) is not None
    assert len(calls) == len(set(calls)) == chains
    await cluster.registry.close()


HALF = replace(FINGERPRINT, kv_dtype="bfloat16", block_bytes=FINGERPRINT.block_bytes // 2)
CASTING = replace(HALF, kv_cast=True)


async def test_a_decode_instance_is_paired_with_those_whose_kv_it_takes() -> None:
    """p1 is of float32, p2 of bfloat16; d1 takes its own dtype alone, d2 any."""
    cluster = Cluster(p2=HALF, d1=HALF, d2=CASTING)
    cluster.placer = cluster.make_placer(max_prefills=2)
    seen = set()
    for address, prompt in (("p:1", PROMPT), ("p:2", [7, *PROMPT])):
        cluster.hold(address, prompt)
        for _ in range(6):
            placement = cluster.placer.place(PlacementRequest(prompt))
            assert placement is not None
            seen.add((placement.decode.address, tuple(placement.decision.prefill_addresses)))
    # Loads even out between the two decode instances; only d2 is ever told of p1.
    assert {address for address, _ in seen} == {"d:1", "d:2"}
    assert {named for address, named in seen if address == "d:1"} == {("p:2",)}
    assert {frozenset(named) for address, named in seen if address == "d:2"} == {frozenset({"p:1", "p:2"})}
    await cluster.registry.close()


async def test_kv_that_was_computed_in_another_dtype_counts_where_it_lies() -> None:
    cluster = Cluster(p2=HALF, d1=CASTING, d2=CASTING)
    cluster.hold("p:1", PROMPT)
    placement = cluster.placer.place(PlacementRequest(PROMPT))
    assert placement is not None
    assert placement.decision.prefill_addresses == ["p:1"]
    assert placement.decision.match_rate_of(InstanceId("p:1")) == 1.0
    assert placement.decision.match_rate_of(InstanceId("p:2")) == 0.0
    await cluster.registry.close()


async def test_an_instance_without_partners_is_used_when_no_other_is_free() -> None:
    cluster = Cluster(p1=HALF, p2=HALF, d2=HALF)
    for _ in range(4):
        placement = cluster.placer.place(PlacementRequest(PROMPT))
        assert placement is not None
        assert (placement.decode.address, bool(placement.decision.prefill_addresses)) == ("d:2", True)
    cluster.set_down(cluster.get("d:2"))
    placement = cluster.placer.place(PlacementRequest(PROMPT))
    assert placement is not None
    assert (placement.decode.address, placement.decision.prefill_addresses) == ("d:1", [])
    assert placement.decision.path is PrefillPath.LOCAL
    assert math.isfinite(placement.decision.score)
    await cluster.registry.close()
