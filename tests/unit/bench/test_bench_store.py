"""The parts of ``baton bench store`` that need no process: replay, plan, pattern, ratios, records, their document."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton_bench import traces
from baton_bench.store import records
from baton_bench.store.plan import Options, Pattern, chain_names, make_plans
from baton_bench.store.records import Cell, Sample, find_ratios, measure_record
from baton_bench.store.replay import REPLAYED, load_requests, replay
from baton_bench.traces import GENERATED, TraceRequest, best_hit_rate, write_trace

DOC = Path(__file__).resolve().parents[3] / "docs" / "bench/store.md"
CHAINS = st.lists(
    st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=1, max_size=30
)  # numbers that choose a branch of a tree


def tree_chains(choices: Sequence[Sequence[int]]) -> list[list[int]]:
    """Turn choices into chains of names in which equal names have equal names before them."""
    known: dict[tuple[int, ...], int] = {}
    return [[known.setdefault(tuple(path[: i + 1]), len(known)) for i in range(len(path))] for path in choices]


def requests_of(chains: Sequence[Sequence[int]], sessions: Sequence[str] = ()) -> list[TraceRequest]:
    """Requests a second apart."""
    names = sessions or [""] * len(chains)
    return [
        TraceRequest(1000.0 * (i + 1), 512 * len(chain), 1, tuple(chain), names[i]) for i, chain in enumerate(chains)
    ]


def conversations(seed: int, requests: int) -> list[list[int]]:
    rng, chains, fresh = random.Random(seed), [], iter(range(1 << 20))
    live: list[list[int]] = [[] for _ in range(12)]
    for _ in range(requests):
        chain = live[rng.randrange(len(live))]
        chain += [next(fresh) for _ in range(rng.randint(1, 6))]
        chains.append(list(chain))
        if len(chain) > 30 or rng.random() < 0.1:
            live[live.index(chain)] = []
    return chains


def plain_lru(chains: Sequence[Sequence[int]], size: int) -> int:
    """Hits of an LRU list as one would write it down."""
    order: list[int] = []
    hits = 0
    for chain in chains:
        found = next((at for at, block in enumerate(chain) if block not in order), len(chain))
        hits += found
        for part in (chain[:found], chain[found:]):
            for block in reversed(part):
                if block in order:
                    order.remove(block)
            part_in = list(part)
            while len(order) + len(part_in) > size and order:
                order.pop(0)
            order += list(reversed(part_in[:size]))
    return hits


@given(CHAINS, st.integers(6, 40))
def test_replayed_lru_is_a_plain_lru_list(choices: list[list[int]], size: int) -> None:
    chains = tree_chains(choices)
    total = sum(map(len, chains))
    assert replay(requests_of(chains), "lru", size).hit_rate == pytest.approx(plain_lru(chains, size) / total, abs=1e-6)


@given(CHAINS, st.integers(6, 40), st.sampled_from(REPLAYED))
def test_no_policy_beats_the_bound_and_the_bound_does_not_beat_endless_memory(
    choices: list[list[int]], size: int, policy: str
) -> None:
    chains = tree_chains(choices)
    bound, best = replay(requests_of(chains), "belady", size), best_hit_rate(chains)
    assert replay(requests_of(chains), policy, size).hit_rate <= bound.hit_rate + 1e-9
    assert bound.hit_rate <= best + 1e-6
    assert replay(requests_of(chains), policy, 10_000).hit_rate == pytest.approx(best, abs=1e-6)


def best_possible(chains: Sequence[Sequence[int]], size: int) -> int:
    """Hits of the best of all decisions, tried out: after each request any part of what is known stays."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for number, chain in enumerate(chains):
        later = {block for other in chains[number + 1 :] for block in other}
        after: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            found = next((at for at, block in enumerate(chain) if block not in held), len(chain))
            pool = sorted((held | set(chain)) & later)
            for mask in range(1 << len(pool)):
                kept = frozenset(block for i, block in enumerate(pool) if mask >> i & 1)
                if len(kept) <= size:
                    after[kept] = max(after.get(kept, 0), hits + found)
        states = after
    return max(states.values())


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=6), st.integers(3, 5))
def test_the_bound_is_what_trying_out_everything_finds(choices: list[list[int]], size: int) -> None:
    chains = tree_chains(choices)
    hits = replay(requests_of(chains), "belady", size).hit_rate * sum(map(len, chains))
    assert round(hits) == best_possible(chains, size)


def test_a_trace_is_replayed_from_a_file_or_generated(tmp_path: Path) -> None:
    requests = requests_of(conversations(1, 200))
    path = tmp_path / "trace.jsonl"
    write_trace(path, requests)
    assert load_requests(str(path)) == requests
    assert load_requests(str(path), 7) == requests[:7]
    assert load_requests("servegen", 20) == GENERATED["servegen"](20, 0)
    rates = {policy: replay(requests, policy, 60).hit_rate for policy in REPLAYED}
    assert 0 < rates["lru"] < rates["belady"] < 1
    assert rates["pool"] == rates["session"]


def test_known_gaps_keep_sessions_through_a_cycle_that_flushes_lru() -> None:
    """Twelve conversations in turn, of which the memory holds eight: LRU always drops the one that comes next."""
    chains = [list(range(100 * (i % 12), 100 * (i % 12) + 10)) for i in range(600)]
    requests = requests_of(chains, [f"s{i % 12}" for i in range(600)])
    runs = {policy: replay(requests, policy, 80) for policy in ("pool", "session", "belady")}
    assert runs["pool"].hit_rate == 0
    assert runs["session"].hit_rate > 0.8 * runs["belady"].hit_rate > 0.4
    assert replay(requests_of(chains), "session", 80).hit_rate == 0


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_LONGEST_LINE", 1000)
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(b"{}\n" + b" " * 2000))
    with pytest.raises(ConfigError, match=r"trace.gz:2 is longer than"):
        list(traces.read_lines(path))


def test_plans_have_chains_for_all_clients_and_more_than_the_disks_store_has_memory_for() -> None:
    options = Options(geometries=("llama-8b", "baton-tiny"), clients=(1, 64), total_bytes=1 << 28)
    plans = make_plans(options)
    assert [plan.block_bytes for plan in plans] == [2 << 20, 24 << 10]
    assert [plan.blocks for plan in plans] == [16, 1024]
    for plan in plans:
        assert plan.chains >= 64
        assert plan.disk_memory_chains < plan.chains / 2
        assert plan.memory(options) > 2 * 64 * plan.chain_bytes


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tiers": ("ram",)}, "tier"),
        ({"ops": ()}, "op"),
        ({"clients": (0,)}, "clients"),
        ({"hits": (101,)}, "hits"),
        ({"kv_dtype": "int3"}, "kv_dtype"),
        ({"repeat": 0}, "repeat"),
        ({"seconds": float("nan")}, "seconds"),
        ({"require_disk": -1.0}, "require_disk"),
    ],
)
def test_options_that_cannot_work_name_their_flag(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options(**changes)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_blocks_larger_than_a_request_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        make_plans(Options(geometries=("llama-8b",), request_bytes=1 << 20))
    assert caught.value.field == "request_bytes"


def test_the_pattern_finds_every_wrong_byte_and_swapped_blocks() -> None:
    names, pattern = chain_names(0, 3, 4), Pattern(64)
    blocks = np.zeros((4, 64), np.uint8)
    pattern.fill(names, blocks)
    assert pattern.wrong(names, blocks) == 0
    for at in range(0, 256, 17):
        damaged = blocks.copy()
        damaged.reshape(-1)[at] ^= 1
        assert pattern.wrong(names, damaged) == 1
    assert pattern.wrong(names, blocks[[1, 0, 2, 3]]) == 2


def cell(method: str, *rates: float) -> Cell:
    found = Cell(method, "get", 1, 100)
    found.samples = [Sample(2.0, int(2 * rate), int(2 * rate), [0.1, 0.3], 0.5) for rate in rates]
    return found


def test_ratios_are_of_turns_side_by_side_and_say_whether_the_aim_is_met() -> None:
    cells = [cell("shm", 70, 7), cell("memcpy", 100, 10), cell("redis", 30, 3), Cell("shm", "get", 4, 100)]
    found = {ratio.name: (ratio.value, ratio.aim, ratio.met) for ratio in find_ratios("m", cells)}
    assert found == {
        "get, memory over shm / memcpy": (0.7, 0.6, True),
        "get, memory over shm / Redis": (2.333, 3.0, False),
    }


def test_a_record_sums_up_its_turns() -> None:
    plan = make_plans(Options(geometries=("llama-8b",)))[0]
    record = measure_record(plan, cell("shm", 100, 200, 400))
    assert (record.blocks_per_s, record.gb_per_s) == (200.0, round(200 * (2 << 20) / 1e9, 4))
    assert (record.requests, record.requests_per_s, record.p50_ms, record.came_percent) == (6, 1.0, 200.0, 100.0)
    assert record.cpu_s_per_gb == pytest.approx(1.5 / (1400 * (2 << 20) / 1e9), abs=1e-4)
    json.loads(record.to_json())


def test_the_document_lists_every_field() -> None:
    section = DOC.read_text(encoding="utf-8").split("## JSON lines")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE)
    written = {name: re.findall(r"`(\w+)`", fields) for name, fields in rows}
    real = {kind.record: [item.name for item in dataclasses.fields(kind)] for kind in records.RECORDS}
    assert written == real
    own = {"baton_bench.report", records.__name__}
    assert set(records.RECORDS) == {kind for kind in records.Record.__subclasses__() if kind.__module__ in own}
