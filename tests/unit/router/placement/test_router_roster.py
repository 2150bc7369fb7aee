"""The part of the roster that one request may use: whose load, KV and pairs it sees."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.servers.fake_worker import FINGERPRINT

from baton.api.v1 import common_pb2
from baton.kv_cache.fingerprint import Fingerprint
from baton.native import address_of
from baton.rpc.http2.message_stream import Dialer
from baton.types import Epoch, InstanceId, Role
from baton_router.indexer.events import EventApplier
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.registry.instance import Instance, InstanceInfo
from baton_router.registry.load import LoadReservation
from baton_router.scheduler.policy import Pairs, Ratings, Scores, choose
from baton_router.scheduler.roster import Candidates, only_compatible

HALF = replace(FINGERPRINT, kv_dtype="bfloat16", block_bytes=FINGERPRINT.block_bytes // 2)
CASTING = replace(HALF, kv_cast=True)
INDEX = PrefixIndex()


def instance(name: str, fingerprint: Fingerprint = FINGERPRINT) -> Instance:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    channel: Any = SimpleNamespace(
        **dict.fromkeys(("unary_unary", "unary_stream", "stream_stream"), lambda *_, **__: None)
    )
    made = Instance(name, role, channel, Dialer(name), EventApplier(INDEX, now=lambda: 0.0))
    made.info = InstanceInfo(
        InstanceId(name), role, Epoch(b"e" * 16), fingerprint, 100, 1000, "m", "", 1000, frozenset()
    )
    return made


def test_a_part_has_the_load_of_its_own_instances() -> None:
    decodes = [instance(f"d{i}") for i in range(3)]
    for tokens, x in zip((1000, 2000, 3000), decodes, strict=True):
        LoadReservation(x.load, tokens, requests=0)
    role = Candidates([], decodes).decode
    for at in ([1, 2], [0, 2], [2], [0, 1, 2]):
        part = role.part(at)
        held = np.array([10.0, 20.0, 30.0])
        side = role.side(part, address_of(held), 100, 1.0)
        assert side.matched.tolist() == [10.0 * (i + 1) for i in at]
        assert side.match_rates.tolist() == pytest.approx([0.1 * (i + 1) for i in at])
        assert side.ids == [f"d{i}" for i in at]
        assert side.work.tolist() == side.loads.tolist() == [1000.0 * (i + 1) for i in at]
    assert role.part([1, 2]) is role.part([1, 2])
    assert role.part([0, 1, 2]) is role.whole


def test_candidates_are_of_both_lists() -> None:
    prefills, decodes = [instance("p0")], [instance("d0")]
    candidates = Candidates(prefills, decodes)
    assert candidates.is_of(prefills, decodes)
    assert not candidates.is_of(list(prefills), decodes)
    assert not candidates.is_of(prefills, list(decodes))


def test_a_part_keeps_who_takes_whose_kv() -> None:
    """p0 computes in float32, p1 in bfloat16; d0 takes float32 alone, d1 bfloat16 alone, d2 both."""
    prefills = [instance("p0"), instance("p1", HALF)]
    decodes = [instance("d0"), instance("d1", HALF), instance("d2", CASTING)]
    candidates = Candidates(prefills, decodes)
    prefill, decode = candidates.prefill, candidates.decode
    expected = np.array([[True, False], [False, True], [True, True]])
    for ps in ([0], [1], [0, 1]):
        for ds in ([0], [1, 2], [0, 2], [0, 1, 2]):
            compat = candidates.compat_of(prefill.part(ps), decode.part(ds))
            assert compat is not None
            assert compat.tolist() == expected[np.ix_(ds, ps)].tolist()
    assert candidates.compat_of(prefill.part([]), decode.whole) is None


def test_a_pair_over_whose_pipes_nothing_comes_is_no_pair() -> None:
    prefills, decodes = [instance("p0"), instance("p1")], [instance("d0"), instance("d1")]
    assert Candidates(prefills, decodes).compat is None
    decodes[0].load.observe(common_pb2.LoadReport(unreadable_prefills=["p1", "gone"]), 16)
    compat = Candidates(prefills, decodes).compat
    assert compat is not None
    assert compat.tolist() == [[True, False], [True, True]]
    decodes[0].load.observe(common_pb2.LoadReport(), 16)
    assert Candidates(prefills, decodes).compat is None


def test_what_travels_is_the_sources_kv() -> None:
    candidates = Candidates([instance("p0"), instance("p1", HALF)], [instance("d0", CASTING)])
    whole = FINGERPRINT.block_bytes / FINGERPRINT.block_size
    prefill, decode = candidates.prefill, candidates.decode
    assert candidates.kv_bytes_per_token(prefill.part([0]), decode.whole) == whole
    assert candidates.kv_bytes_per_token(prefill.part([1]), decode.whole) == whole / 2
    assert candidates.kv_bytes_per_token(prefill.part([]), decode.whole) == whole / 2


@pytest.mark.parametrize("with_pairs", [False, True])
def test_pairs_whose_kv_fits_keep_their_scores(with_pairs: bool) -> None:
    rows = [[-3.0, -1.0], [-2.0, -9.0]]
    pairs = Pairs(rows, lambda p, d: {"moved": rows[d][p]}) if with_pairs else None
    ratings = Ratings(Scores.of(a=[0.0, 0.0]), Scores.of(a=[0.0, 0.0]), pairs=pairs)
    made = only_compatible(ratings, np.array([[True, False], [True, True]])).pairs
    assert made is not None
    fits = rows if with_pairs else [[0.0, 0.0], [0.0, 0.0]]
    assert [list(made.rows[d]) for d in range(2)] == [[fits[0][0], -np.inf], fits[1]]
    assert made.explain(1, 0) == {"kv_dtype": -np.inf}
    assert sum(made.explain(0, 1).values()) == fits[1][0]
    if with_pairs:
        choice = choose(only_compatible(ratings, np.array([[True, False], [True, True]])), random.Random(0))
        assert (choice.prefill, choice.decode, choice.score) == (0, 1, -2.0)
