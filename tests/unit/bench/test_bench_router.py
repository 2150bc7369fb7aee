"""Traces, generated workloads, prefix statistics, and the replay of all policies on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cli.main import main
from baton.errors import ConfigError
from baton.types import Role
from baton_bench.prefixes import read_dataset, repeated_prefixes
from baton_bench.rival_policies import RIVALS
from baton_bench.router import Hardware, Replay, ReplayInstance, ReplayResult, Setup, record
from baton_bench.traces import (
    GeneratorOptions,
    TraceRequest,
    best_hit_rate,
    generate,
    in_bursts,
    read_trace,
    with_sessions,
    write_trace,
)
from baton_router.registry.instance import Instance
from baton_router.scheduler.policies import POLICIES

CHATS = generate(GeneratorOptions(requests=400, prefixes=5, prefix_blocks=3, turns=4, turn_blocks=3, rate=4, seed=1))
CHAT_BLOCKS = [chat.blocks for chat in CHATS]


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, CHATS)
    read = read_trace(path)
    assert [(r.blocks, r.input_tokens, r.output_tokens, r.session) for r in read] == [
        (r.blocks, r.input_tokens, r.output_tokens, r.session) for r in CHATS
    ]
    assert [r.at_ms for r in read] == [round(r.at_ms) for r in CHATS]
    assert len(read_trace(path, limit=7)) == 7


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{", "trace"),
        ("[]", "trace"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "timestamp"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": [1]}', "input_length"),
        ('{"timestamp": 1, "input_length": 5, "output_length": true, "hash_ids": [1]}', "output_length"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [-1]}', "hash_ids"),
        ('{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "hash_ids"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, field: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n" + line + "\n")
    with pytest.raises(ConfigError, match=r"t\.jsonl:2") as caught:
        read_trace(path)
    assert caught.value.field == field


def test_generated_workloads_share_what_they_are_asked_to() -> None:
    one = generate(GeneratorOptions(requests=300, prefixes=1, prefix_blocks=20, turn_blocks=2))
    assert {r.blocks[:20] for r in one} == {tuple(range(20))}
    assert len({r.blocks[20] for r in one}) == 300
    assert all(a.at_ms <= b.at_ms for a, b in pairwise(one))
    by_session: dict[str, list[TraceRequest]] = {}
    for request in CHATS:
        by_session.setdefault(request.session, []).append(request)
    assert max(len(turns) for turns in by_session.values()) > 3
    for turns in by_session.values():
        for before, after in pairwise(turns):
            assert after.blocks[: len(before.blocks)] == before.blocks
    assert generate(GeneratorOptions(requests=50, seed=2)) == generate(GeneratorOptions(requests=50, seed=2))
    with pytest.raises(ConfigError) as caught:
        GeneratorOptions(turns=0.5)
    assert caught.value.field == "turns"


def test_sessions_are_guessed_where_a_trace_names_none() -> None:
    bare = [TraceRequest(r.at_ms, r.input_tokens, r.output_tokens, r.blocks) for r in CHATS]
    bare = [TraceRequest(r.at_ms, r.input_tokens - 1024, r.output_tokens, (0, *r.blocks[3:])) for r in bare]
    guessed = with_sessions(bare)
    names = {(real.session, guess.session) for real, guess in zip(CHATS, guessed, strict=True)}
    assert len(names) == len({real for real, _ in names}) == len({guess for _, guess in names})
    assert with_sessions(CHATS) == CHATS


# --- prefix statistics ---


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=30), st.integers(2, 5))
def test_repeated_prefixes_are_those_that_counting_all_finds(sequences: list[list[int]], seen: int) -> None:
    counts: dict[tuple[int, ...], int] = {}
    for sequence in sequences:
        for end in range(len(sequence) + 1):
            counts[tuple(sequence[:end])] = counts.get(tuple(sequence[:end]), 0) + 1
    expected = [max((end for end in range(len(s) + 1) if counts[tuple(s[:end])] >= seen), default=0) for s in sequences]
    assert repeated_prefixes(sequences, seen) == expected


def test_datasets_of_all_kinds(tmp_path: Path) -> None:
    def shares(*lines: object) -> list[int]:
        path = tmp_path / "d.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return repeated_prefixes(read_dataset(path).sequences, 2)

    assert shares({"token_ids": [1, 2, 3]}, {"token_ids": [1, 2, 4]}) == [2, 2]
    assert shares({"prompt": "ab"}, {"prompt": "abc"}, {"prompt": "x"}) == [2, 2, 0]
    system = {"role": "system", "content": "be kind"}
    one, two = ({"messages": [system, {"role": "user", "content": text}]} for text in ("hi", "yo"))
    assert shares(one, two) == [len("\0system\1be kind\0user\1")] * 2
    assert shares({"conversations": [{"from": "human", "value": "a"}]}) == [0]
    for lines, text in (
        ([{"prompt": "a"}, {"token_ids": [1]}], "tokens"),
        ([{"text": "a"}], "none of"),
        ([{"messages": [{"role": "user"}]}], r"messages\[0\]"),
    ):
        with pytest.raises(ConfigError, match=text):
            shares(*lines)


# --- replay ---


def both_views(replay: Replay, run: ReplayResult) -> Iterator[tuple[ReplayInstance, Instance]]:
    """Yield every instance, and the router's record of it."""
    for role, simulated in ((Role.PREFILL, run.prefills), (Role.DECODE, run.decodes)):
        yield from zip(simulated, replay.router.instances[role], strict=True)


@pytest.mark.parametrize("policy", [*POLICIES, *RIVALS])
def test_every_policy_replays_and_nothing_is_left_over(policy: str) -> None:
    setup = Setup(prefills=4, decodes=3, policy=policy, hardware=Hardware(cache_blocks=400))
    replay = Replay(setup)
    run = replay.run(CHATS)
    assert len(run.ttft_ms) == len(CHATS)
    assert sum(x.num_requests for x in [*run.prefills, *run.decodes]) == len(CHATS)
    for simulated, instance in both_views(replay, run):
        book = instance.load
        assert (book.requests, book.tokens, book.prompts, simulated.decoding) == (0, 0, 0, 0)
        assert instance.events.num_blocks == len(simulated.cache) <= 400, "the index knows what the cache holds"
        assert replay.router.index.num_pending(instance.events.slot) == 0
    found = record(setup, run, CHATS)
    assert 0 < found.hit_rate + found.reused_rate <= best_hit_rate(CHAT_BLOCKS)
    assert found.ttft_ms["p50"] <= found.ttft_ms["p99"]


def test_a_replay_is_the_same_every_time_and_one_instance_finds_all() -> None:
    runs = [Replay(Setup(prefills=3, decodes=2, seed=5)).run(CHATS) for _ in range(2)]
    assert runs[0].ttft_ms == runs[1].ttft_ms
    alone = Setup(prefills=1, decodes=1, threshold=0)
    assert record(alone, Replay(alone).run(CHATS), CHATS).hit_rate == pytest.approx(
        best_hit_rate(CHAT_BLOCKS), abs=1e-6
    )


def test_the_default_keeps_hits_and_balance_on_conversations() -> None:
    found = {
        name: record(setup, Replay(setup).run(CHATS), CHATS)
        for name in ("match_minus_load", "round_robin")
        for setup in [Setup(prefills=4, decodes=4, policy=name)]
    }
    best = best_hit_rate(CHAT_BLOCKS)
    assert found["match_minus_load"].hit_rate > 0.9 * best
    assert found["match_minus_load"].hit_rate > found["round_robin"].hit_rate + 0.1
    assert found["match_minus_load"].load_max_over_mean < 1.2
    assert found["match_minus_load"].ttft_ms["mean"] < found["round_robin"].ttft_ms["mean"]


@pytest.mark.parametrize("rate", [2.0, 20.0])
@pytest.mark.parametrize("instances", [2, 8])
def test_a_system_prompt_of_20_blocks_is_shared_by_all_instances(rate: float, instances: int) -> None:
    requests = generate(GeneratorOptions(requests=800, prefix_blocks=20, rate=rate, seed=3))
    run = Replay(Setup(prefills=instances, decodes=instances)).run(requests)
    computed = [x.computed_tokens for x in run.prefills]
    assert max(computed) <= 1.2 * sum(computed) / instances
    # Whoever computed the shared prompt early has done more by then, and gets fewer of the few requests.
    assert max(x.num_requests for x in run.prefills) <= 1.35 * len(requests) / instances
    assert sum(x.computed_tokens for x in run.prefills) < 0.25 * sum(r.input_tokens for r in requests)


@pytest.mark.parametrize("rate", [2.0, 20.0])
def test_by_cost_instances_of_one_speed_get_the_same_work(rate: float) -> None:
    requests = generate(GeneratorOptions(requests=2000, prefix_blocks=20, rate=rate, seed=3))
    setup = Setup(prefills=8, decodes=8, policy="cost_ms")
    assert record(setup, Replay(setup).run(requests), requests).load_max_over_mean < 1.2


def test_without_the_load_term_it_piles_up() -> None:
    """What the load term is for, and proof that the replay can tell."""
    requests = generate(GeneratorOptions(requests=200, prefix_blocks=20, rate=2.0))
    run = Replay(Setup(prefills=8, decodes=8, beta=0.0, threshold=0)).run(requests)
    assert max(x.num_requests for x in run.prefills) == 200


def test_the_default_gives_slow_instances_less() -> None:
    run = Replay(Setup(prefills=4, decodes=4, slow=1)).run(
        generate(GeneratorOptions(requests=600, prefixes=50, rate=6, seed=2))
    )
    slow, *others = [x.computed_tokens for x in run.prefills]
    assert slow < 0.6 * min(others)
    assert max(others) < 1.3 * min(others)
    equal = Replay(Setup(prefills=4, decodes=4, slow=1, policy="round_robin")).run(CHATS)
    assert equal.prefills[0].num_requests == equal.prefills[1].num_requests, "who does not learn"


def test_what_decode_alone_holds_takes_its_time_on_the_link() -> None:
    request = TraceRequest(0.0, 20 * 512, 1, tuple(range(20)))
    hardware = Hardware(gb_per_s=1.0)
    later = [replace(request, at_ms=1e5), replace(request, at_ms=1e5, blocks=(*range(10), *range(90, 100)))]
    setup = Setup(prefills=3, decodes=1, policy="round_robin", hardware=hardware)
    run = Replay(setup).run([request, *later])
    first, second, third = run.ttft_ms
    whole, half = (1000 * hardware.transfer_s(blocks * 512) for blocks in (20, 10))
    computed, all_computed = (1000 * hardware.prefill_s(Role.PREFILL, blocks * 512) for blocks in (10, 20))
    assert first == pytest.approx(max(whole, all_computed + whole / 32), rel=0.01)
    assert second == pytest.approx(whole + 1000 * hardware.prefill_s(Role.PREFILL, 1), rel=0.01)
    exposed = max(half - computed, half / 32)
    assert third == pytest.approx(whole + half + computed + exposed, rel=0.01), "the link was busy with the other one"


def test_nobody_waits_for_ever_and_nobody_is_quick_by_serving_less() -> None:
    flood = generate(GeneratorOptions(requests=300, prefixes=300, rate=12, seed=4))
    for limit in (0, 8):
        setup = Setup(prefills=2, decodes=2, policy="least_loaded", max_inflight=limit, patience_s=10.0)
        replay = Replay(setup)
        run = replay.run(flood)
        found = record(setup, run, flood)
        assert len(run.ttft_ms) == len(flood)
        assert 0.1 < found.given_up_share < 0.9
        assert max(run.ttft_ms) >= 10_000
        assert all(
            instance.load.requests == 0 and not simulated.queue for simulated, instance in both_views(replay, run)
        )


def test_bursts_keep_every_request_and_its_minute() -> None:
    squeezed = in_bursts(CHATS, 4.0)
    assert [x.blocks for x in squeezed] == [x.blocks for x in CHATS]
    assert all(x.at_ms // 60_000 == y.at_ms // 60_000 for x, y in zip(squeezed, CHATS, strict=True))
    assert max(x.at_ms % 60_000 for x in squeezed) <= 15_000


# --- the commands ---


def test_bench_router_in_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["bench", "router", "--generate", "60", "--instances", "4", "--json"]
    scenarios = ["--scenarios", "equal,unequal,bursts,bounded", "--policy", "match_minus_load,rivals"]
    assert main([*flags, *scenarios, "--require-ttft", "1000"]) == 0
    found = json.loads(capsys.readouterr().out)["scenarios"]
    assert list(found) == ["equal", "unequal", "bursts", "bounded"]
    assert (found["unequal"]["slow"], found["bounded"]["hardware"]["cache_blocks"]) == (1, 1000)
    assert [x["policy"] for x in found["bursts"]["policies"]] == ["match_minus_load", *RIVALS]
    assert main([*flags, "--policy", "match_minus_load", "--require-ttft", "0.5"]) == 3
    assert "times the mean TTFT" in capsys.readouterr().err
    assert main(["bench", "router", "--generate", "9", "--scenarios", "equal", "--policy", "dynamo_cost"]) == 0
    assert "dynamo_cost" in capsys.readouterr().out
    assert main([*flags, "--scenarios", "sunny"]) == 2


def test_bench_router_from_generation_to_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, picture = tmp_path / "t.jsonl", tmp_path / "p.svg"
    policies = ["--policy", "match_minus_load,round_robin", "--beta", "0.2,0.5"]
    flags = ["--instances", "2", *policies, "--plot", str(picture)]
    assert main(["bench", "router", "--generate", "60", "--save", str(trace), "--json", *flags]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [(x["policy"], x["beta"]) for x in made["policies"]] == [
        ("match_minus_load", 0.2),
        ("match_minus_load", 0.5),
        ("round_robin", None),
    ]
    drawn = picture.read_text(encoding="utf-8")  # texts are outlines, each with a comment that says what it is
    assert "match_minus_load β=0.2" in drawn
    assert "round_robin" in drawn
    assert main(["bench", "router", "--trace", str(trace), *flags]) == 0
    table = capsys.readouterr().out
    assert f"best possible block hit rate {made['best_hit_rate']:.2%}" in table
    assert "match_minus_load" in table
    assert main(["bench", "router", "--trace", str(trace), "--instances", "2", "--require-hit-rate", "99"]) == 3
    assert main(["bench", "router", "--trace", str(trace), "--instances", "2", "--require-hit-rate", "10"]) == 0
    capsys.readouterr()
    assert main(["bench", "prefixes", "--dataset", str(trace), "--longer-than", "19,30", "--seen", "60", "--json"]) == 0
    shares = json.loads(capsys.readouterr().out)["shares"]
    assert [row["share"] for row in shares] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "--trace FILE or --generate N"),
        (["--trace", "/nowhere"], "cannot read /nowhere"),
        (["--generate", "0"], "requests must be at least 1"),
        (["--generate", "5", "--policy", "best"], "round_robin"),
        (["--generate", "5", "--beta", "x"], "--beta takes numbers"),
        (["--generate", "5", "--beta", "-1"], "beta must be between"),
        (["--generate", "5", "--instances", "0"], "prefills must be between"),
        (["--generate", "5", "--plot", "x.gif"], "ends in .png or .svg"),
        (["--generate", "5", "--gb-per-s", "0"], "gb_per_s must be above 0"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "router", *flags]) == 2
    assert text in capsys.readouterr().err
