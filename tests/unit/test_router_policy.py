"""Policies by themselves, and the default one under a simulated load with shared prefixes."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import pytest

from baton.errors import ConfigError
from baton.hashing import block_hashes, root_hash
from baton.types import BlockHash, InstanceId
from baton_router.index import PrefixIndex
from baton_router.policy import POLICIES, Candidate, Policy, make_policy, relative_loads


def candidate(name: str, match: float = 0.0, load: float = 0.0, cost: float = 100.0) -> Candidate:
    return Candidate(InstanceId(name), match, load, cost)


def best(policy: Policy, *candidates: Candidate) -> str:
    return candidates[policy.rank([], candidates).decode[0].position].instance_id


def test_relative_loads() -> None:
    assert relative_loads([]) == []
    assert relative_loads([candidate("a"), candidate("b")]) == [1.0, 1.0]
    assert relative_loads([candidate("a", load=100), candidate("b", load=300)]) == [125 / 225, 325 / 225]
    assert relative_loads([candidate("a", cost=0)]) == [1.0]


def test_match_wins_until_its_place_is_too_busy() -> None:
    policy = make_policy("match_minus_load", beta=0.3, seed=1)
    idle = [candidate(x) for x in "abc"]
    assert best(policy, *idle, candidate("d", match=0.9, load=100)) == "d"
    assert best(policy, *idle, candidate("d", match=0.2, load=400)) != "d"
    scored = policy.rank([candidate("p", match=0.5)], idle)
    assert scored.prefill[0].score == pytest.approx(0.5 - 0.3)


def test_beta() -> None:
    pile = make_policy("match_minus_load", beta=0.0, seed=1)
    assert best(pile, candidate("a", match=0.01, load=1e9), candidate("b")) == "a"
    flat = make_policy("match_minus_load", beta=100.0, seed=1)
    assert best(flat, candidate("a", match=1.0, load=20), candidate("b")) == "b"
    for beta in (-0.1, float("nan"), 101.0):
        with pytest.raises(ConfigError) as caught:
            make_policy("match_minus_load", beta=beta)
        assert caught.value.field == "beta"


@pytest.mark.parametrize("name", ["match_minus_load", "least_loaded", "random"])
def test_ties_are_broken_at_random_and_by_seed(name: str) -> None:
    candidates = [candidate(x) for x in "abcd"]
    runs = [[best(policy, *candidates) for _ in range(400)] for policy in (make_policy(name, seed=3) for _ in range(2))]
    assert runs[0] == runs[1]
    counts = [runs[0].count(x) for x in "abcd"]
    assert min(counts) > 60, counts


def test_round_robin_is_fair_while_instances_come_and_go() -> None:
    policy = make_policy("round_robin")
    chosen = []
    for names in ["ab", "ab", "abc", "abc", "abc", "bc", "abc"]:
        name = best(policy, *(candidate(x) for x in names))
        assert best(policy, *(candidate(x) for x in names)) == name, "asking changes nothing"
        policy.chosen([InstanceId(name)])
        chosen.append(name)
    assert "".join(chosen) == "abcabca"


def test_least_loaded() -> None:
    policy = make_policy("least_loaded", seed=0)
    ranking = policy.rank([candidate("a", match=1.0, load=5), candidate("b", load=4), candidate("c", load=6)], [])
    assert [s.position for s in ranking.prefill] == [1, 0, 2]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_ranks_everybody(name: str) -> None:
    policy = make_policy(name, seed=0)
    ranking = policy.rank([candidate("p")], [candidate(x) for x in "abc"])
    assert sorted(s.position for s in ranking.decode) == [0, 1, 2]
    assert len(ranking.prefill) == 1
    assert make_policy(name).rank([], []).decode == []


def test_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="round_robin"):
        make_policy("best")


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
        candidates = [
            Candidate(InstanceId(str(i)), depths.get(s.slot, 0) * BLOCK / len(prompt), s.work, len(prompt) + OVERHEAD)
            for i, s in enumerate(sims)
        ]
        position = policy.rank(candidates, []).prefill[0].position
        policy.chosen([InstanceId(str(position))])
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
    default = simulate(make_policy("match_minus_load", beta=0.3, seed=seed), seed=seed)
    blind = simulate(make_policy("round_robin"), seed=seed)
    assert default.max_share <= 1.2
    assert default.hit_rate >= 0.96 * default.best_hit_rate
    assert default.hit_rate >= blind.hit_rate + 0.1


def test_without_the_load_term_it_piles_up() -> None:
    """What the load term is for, and proof that the simulation can tell."""
    assert simulate(make_policy("match_minus_load", beta=0.0, seed=0), seed=0).max_share > 2.0
