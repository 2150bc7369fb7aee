"""Policies by themselves, and the default one under a simulated load with shared prefixes."""

from __future__ import annotations

import math
import random
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.hashing import block_hashes, root_hash
from baton.types import BlockHash, InstanceId, PrefillPath, Role
from baton_router.indexer.prefix_index import PrefixIndex
from baton_router.registry.load import LoadTracker
from baton_router.scheduler.policies import (
    POLICIES,
    Policy,
    PolicyContext,
    Ratings,
    Request,
    Scores,
    Side,
    make_policy,
    relative_loads,
)
from baton_router.scheduler.policies.registry import configured_policy, parse_options
from baton_router.scheduler.policy import choose
from baton_router.scheduler.speeds import Speeds


def side(
    match: Sequence[float] = (0, 0, 0),
    work: Sequence[float] = (),
    *,
    role: Role = Role.DECODE,
    cost: float = 100.0,
) -> Side:
    """Instances a, b, c, ... with these match rates (of 1000 tokens) and work in flight."""
    ids = [InstanceId("abcdefghijklmnop"[i]) for i in range(len(match))]
    work = list(work) or [0.0] * len(ids)
    books = [LoadTracker(role) for _ in ids]
    matched = np.array([round(1000 * x) for x in match])
    return Side(role, ids, matched, np.array(match), np.array(work), np.array(work), cost, books)


NONE = side([], role=Role.PREFILL)
REQUEST = Request(1000)


def best(policy: Policy, decode: Side, rng: random.Random | None = None, request: Request = REQUEST) -> str:
    ratings = policy.score(request, NONE, decode)
    return decode.ids[choose(ratings, rng or random.Random(0)).decode]


def test_relative_loads() -> None:
    assert relative_loads(side([])).tolist() == []
    assert relative_loads(side([0, 0])).tolist() == [1.0, 1.0]
    assert relative_loads(side([0, 0], [100, 300])) == pytest.approx([125 / 225, 325 / 225])
    assert relative_loads(side([0], cost=0)).tolist() == [1.0]


def test_match_wins_until_its_place_is_too_busy() -> None:
    policy = make_policy("match_minus_load")
    assert best(policy, side([0, 0, 0, 0.9], [0, 0, 0, 50])) == "d"
    assert best(policy, side([0, 0, 0, 0.2], [0, 0, 0, 400])) != "d"
    ratings = policy.score(REQUEST, side([0.5], [2020], role=Role.PREFILL), side([0, 0.5, 0.8]))
    assert ratings.prefill.totals == pytest.approx([0.01 - 0.5 * 2]), "two prompts like this one wait there"
    assert ratings.prefill.explain(0) == {"match": 0.01, "load": pytest.approx(-1.0), "even": 0.0}
    assert ratings.pairs is not None
    matches = [ratings.pairs.rows[d][0] for d in range(3)]
    assert matches == pytest.approx([1 - 507.5 / 1010, 1 - 507.5 / 1010, 1 - 203.6 / 1010]), "context counts"
    assert ratings.pairs.explain(0, 2) == {"match": pytest.approx(matches[2]), "speed": 0.0}


def test_the_default_divides_by_learnt_speed() -> None:
    speeds = Speeds(lambda: 0.0)
    policy = make_policy("match_minus_load", PolicyContext(speeds=speeds))
    prefill = side([0, 0.3, 0], [1000, 1000, 1900], role=Role.PREFILL)
    for name, factor in (("a", 1.0), ("b", 3.0), ("c", 1.0)):
        for amount in (100.0, 1000.0, 3000.0):
            speeds.prefill.add(name, amount, factor * amount)
    ratings = policy.score(REQUEST, prefill, side([0, 0], [5, 5]))
    assert ratings.pairs is not None
    totals = ratings.prefill.totals + ratings.pairs.rows[0]
    assert totals.argmax() == 0, "b has a third of the prompt, and takes three times as long"
    assert max(ratings.prefill.explain(1)["load"], ratings.pairs.explain(1, 0)["speed"]) < 0


def test_the_default_has_decode_compute_what_would_wait() -> None:
    speeds = Speeds(lambda: 0.0)
    policy = make_policy("match_minus_load", PolicyContext(speeds=speeds))
    busy, idle = side([0, 0], [5000, 4000], role=Role.PREFILL), side([0, 0], role=Role.PREFILL)
    decode = side([0, 0])
    assert policy.score(REQUEST, busy, decode).local is None, "no speed is known"
    for amount in (100.0, 1000.0, 3000.0):
        speeds.prefill.add("a", amount, amount)
    rng = random.Random(0)
    assert choose(policy.score(REQUEST, busy, decode), rng).path is PrefillPath.LOCAL
    left = choose(policy.score(REQUEST, idle, decode), rng)
    assert (left.path, left.prefill is None) == (None, False), "decode's own threshold decides, as before"
    below = Request(1000, threshold=64)
    assert policy.score(below, busy, decode).local is None, "the operator's threshold decides"
    for tracker in decode.trackers:
        tracker.prompts = 20_000  # type: ignore[attr-defined]
    assert choose(policy.score(REQUEST, busy, decode), rng).path is None


def taught(**factors: float) -> Speeds:
    """A millisecond per token for a prompt, 10 for a decode step, times an instance's factor."""
    speeds = Speeds(lambda: 0.0)
    for name, factor in factors.items():
        for amount in (100.0, 1000.0, 3000.0):
            speeds.prefill.add(name, amount, amount * factor)
            speeds.decode.add(name, 1.0, 10.0 * factor)
    return speeds


def test_a_difference_like_noise_makes_no_instance_slower_and_a_greater_one_does() -> None:
    for factor, differ in ((1.15, False), (1.5, True)):
        policy = make_policy("match_minus_load", PolicyContext(speeds=taught(a=1.0, b=factor)))
        ratings = policy.score(REQUEST, side([0, 0], [500, 500], role=Role.PREFILL), side([0, 0], [500, 500]))
        assert ratings.pairs is not None
        for totals in (ratings.prefill.totals + ratings.pairs.rows[0], ratings.decode.totals):
            assert bool(totals[0] > totals[1] + 1e-9) is differ
            assert totals[0] >= totals[1]


def test_beta() -> None:
    pile = make_policy("match_minus_load", PolicyContext(beta=0.0))
    assert best(pile, side([0.01, 0], [1e9, 0])) == "a"
    flat = make_policy("match_minus_load", PolicyContext(beta=100.0))
    assert best(flat, side([1.0, 0], [20, 0])) == "b"
    for name in ("beta", "temperature"):
        for value in (-0.1, float("nan"), 101.0):
            with pytest.raises(ConfigError) as caught:
                make_policy("match_minus_load", PolicyContext(**{name: value}))
            assert caught.value.field == name


@pytest.mark.parametrize("name", ["match_minus_load", "least_loaded", "random", "power_of_two", "cost_ms"])
def test_ties_are_broken_at_random_and_by_seed(name: str) -> None:
    def run() -> list[str]:
        policy, rng = make_policy(name, PolicyContext(rng=random.Random(4))), random.Random(3)
        return [best(policy, side([0] * 4), rng) for _ in range(400)]

    chosen = run()
    assert run() == chosen
    counts = [chosen.count(x) for x in "abcd"]
    assert min(counts) > 60, counts


def test_temperature_spreads_in_proportion_to_the_scores() -> None:
    policy, rng = make_policy("match_minus_load", PolicyContext(beta=0.0, temperature=0.1)), random.Random(1)
    chosen = [best(policy, side([0.3, 0.2, -3.0]), rng) for _ in range(4000)]
    assert chosen.count("c") == 0
    assert chosen.count("a") / chosen.count("b") == pytest.approx(math.e, rel=0.15)


def test_round_robin_is_fair_while_instances_come_and_go() -> None:
    policy = make_policy("round_robin")
    chosen = []
    for names in ["ab", "ab", "abc", "abc", "abc", "bc", "abc"]:
        there = side([0] * len(names))
        there.ids = [InstanceId(x) for x in names]
        name = best(policy, there)
        assert best(policy, there) == name, "asking changes nothing"
        policy.chosen(REQUEST, [InstanceId(name)])
        chosen.append(name)
    assert "".join(chosen) == "abcabca"


def test_round_robin_forgets_names_of_long_ago() -> None:
    policy, names = make_policy("round_robin"), [InstanceId(f"pod-{i}") for i in range(10_000)]
    for name in names:
        policy.chosen(REQUEST, [name])
    fleet = side([0, 0, 0])
    fleet.ids = [names[-1], InstanceId("that was never chosen"), names[0]]
    assert best(policy, fleet) == names[0], "it counts as never chosen, too, and is the first of these by name"


def test_least_loaded() -> None:
    totals = make_policy("least_loaded").score(REQUEST, side([1.0, 0, 0], [5, 4, 6], role=Role.PREFILL), side()).prefill
    assert sorted(range(3), key=lambda i: -totals.totals[i]) == [1, 0, 2]


def test_power_of_two_never_takes_the_fullest_and_not_always_the_emptiest() -> None:
    policy, rng = make_policy("power_of_two", PolicyContext(rng=random.Random(0))), random.Random(0)
    chosen = [best(policy, side([0] * 4, [40, 30, 20, 10]), rng) for _ in range(600)]
    assert chosen.count("a") == 0
    # d is drawn in half of all draws, c wins against a and b, b against a alone.
    assert [chosen.count(x) / 600 for x in "bcd"] == pytest.approx([1 / 6, 2 / 6, 3 / 6], abs=0.07)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("num_prefills", [0, 2])
def test_every_policy_scores_everybody_by_terms_that_add_up(name: str, num_prefills: int) -> None:
    policy = make_policy(name)
    prefill = side([0.4] * num_prefills, role=Role.PREFILL)
    request = Request(1000, session="s", kv_bytes_per_token=100.0)
    ratings = policy.score(request, prefill, side([0, 0.5, 0.9]))
    for scores, size in ((ratings.prefill, num_prefills), (ratings.decode, 3), (ratings.local, 3)):
        if scores is not None:
            assert len(scores.totals) == size
            assert scores.totals == pytest.approx([sum(scores.explain(i).values()) for i in range(size)])
    if ratings.pairs is not None:
        for d in range(3):
            explained = [sum(ratings.pairs.explain(p, d).values()) for p in range(num_prefills)]
            assert list(ratings.pairs.rows[d]) == pytest.approx(explained)
    assert make_policy(name).score(request, NONE, side([])).decode.totals.tolist() == []


def test_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="round_robin"):
        make_policy("best")
    with pytest.raises(ConfigError) as caught:
        make_policy("random", PolicyContext(options={"a": "b"}))
    assert caught.value.field == "policy_options"
    assert parse_options(["a=b=c", "d="]) == {"a": "b=c", "d": ""}
    with pytest.raises(ConfigError, match="key=value"):
        parse_options(["=b"])


# --- sessions ---


def in_session(name: str) -> Request:
    return Request(1000, session=name)


def test_a_session_stays_where_it_is_whatever_the_scores_say() -> None:
    policy = make_policy("session")
    homes = {name: best(policy, side([0] * 4), request=in_session(name)) for name in map(str, range(200))}
    assert set(homes.values()) == set("abcd")
    for name, home in homes.items():
        others = side([0.0 if x == home else 1.0 for x in "abcd"], [200.0 if x == home else 150.0 for x in "abcd"])
        assert best(make_policy("session"), others, request=in_session(name)) == home


def test_a_sessions_home_is_not_drawn() -> None:
    policy = make_policy("session", PolicyContext(temperature=100.0))
    assert policy.score(REQUEST, NONE, side()).temperature == 100.0
    assert policy.score(in_session("s"), NONE, side()).temperature == 0.0


def test_only_sessions_of_an_instance_that_left_move() -> None:
    policy = make_policy("session")
    names = list(map(str, range(200)))
    before = {name: best(policy, side([0] * 4), request=in_session(name)) for name in names}
    after = {name: best(policy, side([0] * 3), request=in_session(name)) for name in names}
    assert all(after[name] == before[name] for name in names if before[name] != "d")
    assert {after[name] for name in names if before[name] == "d"} == set("abc")


def test_an_overloaded_home_gives_way_and_requests_without_a_session_go_by_score() -> None:
    policy = make_policy("session", PolicyContext(session_overload=2.0))
    home = best(policy, side([0] * 4), request=in_session("s"))
    work = [10_000.0 if x == home else 10.0 for x in "abcd"]
    elsewhere = best(policy, side([0] * 4, work), request=in_session("s"))
    assert elsewhere != home
    assert best(policy, side([0] * 4, work), request=in_session("s")) == elsewhere, "always the same second home"
    assert best(policy, side([0, 0, 0.5, 0])) == "c"
    with pytest.raises(ConfigError) as caught:
        make_policy("session", PolicyContext(session_overload=1.0))
    assert caught.value.field == "session_overload"


# --- policies of other packages ---


class Nearest:
    """The one whose name comes first: a policy as somebody else would write it."""

    name = "nearest"

    def __init__(self, context: PolicyContext) -> None:
        self.weight = float(context.options["weight"])

    def score(self, request: Request, prefill: Side, decode: Side) -> Ratings:
        scores = [Scores.of(near=[-self.weight * ord(x[0]) for x in s.ids]) for s in (prefill, decode)]
        return Ratings(*scores)

    def chosen(self, request: Request, instances: Sequence[InstanceId]) -> None:
        pass


def test_a_policy_of_another_package_is_found_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    points = {"nearest": f"{__name__}:Nearest", "absent": "no_such_module:x", "not_one": "builtins:str"}
    lines = "\n".join(f"{name} = {value}" for name, value in points.items())
    (info / "entry_points.txt").write_text(f"[baton.router_policies]\n{lines}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or ModuleType(__name__))
    monkeypatch.setattr(sys.modules[__name__], "Nearest", Nearest, raising=False)
    config = RouterConfig(policy="nearest", policy_options=("weight=2",))
    policy = configured_policy(config, Speeds())
    assert best(policy, side([0, 1])) == "a"
    assert policy.score(REQUEST, NONE, side([0])).decode.explain(0) == {"near": -2.0 * ord("a")}
    for name, text in (("nearest", "weight"), ("absent", "no_such_module"), ("not_one", "scores nothing")):
        with pytest.raises(ConfigError, match=text) as caught:
            configured_policy(RouterConfig(policy=name), Speeds())
        assert caught.value.field == "policy"


# --- simulation ---

BLOCK, SPEED, OVERHEAD = 16, 2000.0, 64


@dataclass
class SimInstance:
    """A prefill instance: one queue, an LRU cache, events that arrive when a prompt was computed."""

    slot: int
    free_at: float = 0.0
    cache: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)
    queue: list[tuple[float, int, list[BlockHash]]] = field(default_factory=list)
    work: int = 0
    computed: int = 0


@dataclass
class Outcome:
    hit_rate: float
    best_hit_rate: float
    max_share: float


def simulate(policy: Policy, *, instances: int = 8, requests: int = 3000, seed: int = 0) -> Outcome:
    rng, index = random.Random(seed), PrefixIndex()
    sims = [SimInstance(index.add()) for _ in range(instances)]
    system = list(range(4 * BLOCK))
    prefixes = [system + [rng.randrange(10_000) for _ in range(BLOCK * rng.randint(4, 56))] for _ in range(60)]
    weights = [1 / (rank + 1) for rank in range(len(prefixes))]
    seen: set[BlockHash] = set()
    now, total, hits, possible = 0.0, 0, 0, 0
    for _ in range(requests):
        now += rng.expovariate(instances * SPEED / 330)
        prompt = rng.choices(prefixes, weights)[0] + [rng.randrange(10_000) for _ in range(BLOCK * rng.randint(1, 20))]
        hashes = block_hashes(prompt, BLOCK, root_hash(b"sim"))
        for sim in sims:
            finish_until(sim, index, now)
        depths = index.match(hashes, -1)
        matched = [depths.get(s.slot, 0) * BLOCK for s in sims]
        held, work = np.array(matched, float), np.array([s.work for s in sims], float)
        ids = [InstanceId(str(i)) for i in range(instances)]
        candidates = Side(Role.PREFILL, ids, held, held / len(prompt), work, work, len(prompt) + OVERHEAD)
        request = Request(len(prompt))
        choice = choose(policy.score(request, candidates, side([0])), rng)
        assert choice.prefill is not None
        position = choice.prefill
        policy.chosen(request, [ids[position]])
        sim = sims[position]
        depth = next((i for i, h in enumerate(hashes) if h not in sim.cache), len(hashes))
        missing = len(prompt) - depth * BLOCK
        total, hits = total + len(prompt), hits + depth * BLOCK
        possible += BLOCK * next((i for i, h in enumerate(hashes) if h not in seen), len(hashes))
        seen.update(hashes)
        sim.computed += missing
        sim.work += missing + OVERHEAD
        sim.free_at = max(now, sim.free_at) + (missing + OVERHEAD) / SPEED
        sim.queue.append((sim.free_at, missing + OVERHEAD, hashes))
    mean = sum(s.computed for s in sims) / instances
    return Outcome(hits / total, possible / total, max(s.computed for s in sims) / mean)


def finish_until(sim: SimInstance, index: PrefixIndex, now: float, capacity: int = 1500) -> None:
    while sim.queue and sim.queue[0][0] <= now:
        _, work, hashes = sim.queue.pop(0)
        sim.work -= work
        for item in hashes:
            sim.cache[item] = None
            sim.cache.move_to_end(item)
        index.stored(sim.slot, hashes)
        while len(sim.cache) > capacity:
            index.removed(sim.slot, [sim.cache.popitem(last=False)[0]])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_keeps_hits_and_balance(seed: int) -> None:
    default = simulate(make_policy("match_minus_load"), seed=seed)
    blind = simulate(make_policy("round_robin"), seed=seed)
    assert default.max_share <= 1.2
    assert default.hit_rate >= 0.96 * default.best_hit_rate
    assert default.hit_rate >= blind.hit_rate + 0.1


def test_without_the_load_term_it_piles_up() -> None:
    """What the load term is for, and proof that the simulation can tell."""
    assert simulate(make_policy("match_minus_load", PolicyContext(beta=0.0)), seed=0).max_share > 2.0
