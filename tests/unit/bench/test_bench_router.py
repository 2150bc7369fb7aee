"""Traces, generated workloads, prefix statistics, and the replay of all policies on them."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cli.main import main
from baton.errors import ConfigError
from baton.types import InstanceId, Role
from baton_bench.prefixes import read_dataset, repeated_prefixes
from baton_bench.rival_policies import RIVALS
from baton_bench.router import (
    LLAMA_70B,
    PolicyRecord,
    Replay,
    Setup,
    bound_ms,
    fresh_tokens,
    mean_shortest_first,
    record,
    replay,
)
from baton_bench.simulator.engine import SimulatedEngine
from baton_bench.simulator.simulation import Deployment
from baton_bench.traces import (
    GENERATED,
    GeneratorOptions,
    TraceRequest,
    generate,
    in_bursts,
    read_trace,
    scaled,
    scaled_block,
    with_sessions,
    write_trace,
)
from baton_router.registry.instance import Instance
from baton_router.registry.load import LoadTracker
from baton_router.scheduler.policies import POLICIES, Request, Side
from baton_router.scheduler.speeds import Speeds

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


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,1025,10\n2023-11-16 18:17:04.0319600,3,8\n"
)


def agent_line(**changes: object) -> str:
    line = {"session_id": "a", "model": "m", "input": [{"role": "user", "content": "x" * 5000}], "output_length": 5}
    return json.dumps(line | {"pre_gap": 1.5} | changes)


def test_forms_are_told_apart_by_their_first_line_and_unpacked(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(AZURE)
    one, two = read_trace(azure)
    assert (one.at_ms, one.input_tokens, one.output_tokens, len(one.blocks)) == (0.0, 1025, 10, 3)
    assert two.at_ms == pytest.approx(52.0)
    assert not set(one.blocks) & set(two.blocks), "the form does not say what prompts share"

    agents = tmp_path / "agents.jsonl.gz"
    longer = [{"role": "user", "content": "x" * 5000}, {"role": "assistant", "content": "y" * 3000}]
    lines = agent_line(), agent_line(session_id="b"), agent_line(input=longer)
    agents.write_bytes(gzip.compress("\n".join(lines).encode()))
    first, third, second = read_trace(agents)
    assert (first.session, first.delay_ms, first.blocks[0]) == ("a", 1500.0, second.blocks[0])
    assert second.blocks == first.blocks
    assert third.blocks[:2] == first.blocks[:2], "a session's prompt begins with its last one"
    assert third.blocks[2] != first.blocks[2], "a block that grew is another one"

    chats = tmp_path / "chats.jsonl"
    delayed = [replace(chat, delay_ms=5.0) for chat in CHATS]
    write_trace(chats, delayed)
    packed = tmp_path / "chats.gz"
    packed.write_bytes(gzip.compress(chats.read_bytes()))
    assert read_trace(packed) == read_trace(chats)
    assert {request.delay_ms for request in read_trace(packed)} == {5.0}


@pytest.mark.parametrize(
    ("text", "where", "field"),
    [
        ("", "t.jsonl has no request", "trace"),
        ("hello\n", "t.jsonl:1: the form is unknown", "trace"),
        (AZURE + "2023-11-16 18:17:04.5,7\n", "t.jsonl:4 has no GeneratedTokens", "GeneratedTokens"),
        (AZURE + "yesterday,7,8\n", "t.jsonl:4: TIMESTAMP", "TIMESTAMP"),
        (AZURE + "2023-11-16 18:17:05,x,8\n", "t.jsonl:4: ContextTokens", "ContextTokens"),
        (AZURE + "2023-11-16 18:17:03,7,8\n", "t.jsonl:4: timestamp is", "timestamp"),
        (agent_line(session_id=""), "t.jsonl:1: session_id", "session_id"),
        (agent_line(pre_gap=-1), "t.jsonl:1: pre_gap", "pre_gap"),
        (agent_line(input="hi"), "t.jsonl:1: input", "input"),
        (agent_line(input=[]), "t.jsonl:1: input", "input"),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1], "delay_ms": 3}',
            "t.jsonl:1: delay_ms needs a session_id",
            "session_id",
        ),
    ],
)
def test_a_wrong_trace_is_named_by_file_line_and_field(tmp_path: Path, text: str, where: str, field: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert where in str(caught.value)
    assert caught.value.field == field


def test_a_broken_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress((AZURE + "2023-11-16 18:17:05,7,8\n" * 100).encode())[:-12])
    with pytest.raises(ConfigError, match=r"cannot read .*t\.gz"):
        read_trace(path)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(-511, 0), st.integers(1, 900)), min_size=1, max_size=8),
    st.floats(0.001, 2.0),
    st.floats(0.01, 10.0),
)
def test_a_scaled_trace_shares_what_it_shared(rows: list[tuple[int, int, int]], lengths: float, times: float) -> None:
    requests = [
        TraceRequest(100.0 * at, 512 * blocks + less, output, tuple(range(blocks)), "s", 40.0)
        for at, (blocks, less, output) in enumerate(rows)
    ]
    block = scaled_block(lengths)
    for before, after in zip(requests, scaled(requests, lengths, times), strict=True):
        assert (len(after.blocks) - 1) * block < after.input_tokens <= len(after.blocks) * block
        assert after.blocks == before.blocks[: len(after.blocks)]
        # The rounding of a block's length adds up over all blocks.
        assert after.input_tokens == pytest.approx(lengths * before.input_tokens, abs=1 + 0.5 * len(before.blocks))
        assert after.output_tokens == max(1, round(lengths * before.output_tokens))
        assert (after.at_ms, after.delay_ms) == pytest.approx((times * before.at_ms, times * 40.0))
    assert scaled(requests) == requests


def test_a_replay_of_a_scaled_trace_finds_as_many_blocks() -> None:
    shorter = scaled(CHATS, 1 / 32, 1 / 32)
    fast = replace(ENGINE, prefill=replace(ENGINE.prefill, fixed_s=0.0), decode=replace(ENGINE.decode, fixed_s=0.0))
    whole = served(setup_of(1, 1, threshold=0, prefill=fast, decode=fast), CHATS)
    parts = served(setup_of(1, 1, threshold=0, block_tokens=16, prefill=fast, decode=fast), shorter)
    assert parts.hit_rate == pytest.approx(whole.hit_rate, abs=0.01)


def test_generated_clients_are_unequal() -> None:
    requests = GENERATED["servegen"](1000, 0)
    assert requests == GENERATED["servegen"](1000, 0)
    assert len(requests) == 1000
    assert all(a.at_ms <= b.at_ms for a, b in pairwise(requests))
    sizes = [sum(x.session == f"c{client}" for x in requests) for client in range(40)]
    assert max(sizes) > 5 * sorted(sizes)[20], "a few clients send most requests"
    assert all((len(x.blocks) - 1) * 512 < x.input_tokens <= len(x.blocks) * 512 for x in requests)


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

ENGINE = LLAMA_70B.engines[0]


def setup_of(prefills: int = 4, decodes: int = 4, policy: str = "match_minus_load", **changes: object) -> Setup:
    """Return a deployment of the default hardware; changes are to fields of the setup or of the deployment."""
    deployment = Deployment(
        prefills, decodes, ENGINE, ENGINE, LLAMA_70B.limits, LLAMA_70B.link, 80, 327_680.0, policy=policy
    )
    own = {name: changes.pop(name) for name in list(changes) if name in Setup.__dataclass_fields__}
    return Setup(replace(deployment, **changes), **own)  # type: ignore[arg-type]


def both_views(run: Replay) -> Iterator[tuple[SimulatedEngine, Instance]]:
    """Yield every instance, and the router's record of it."""
    for role, simulated in ((Role.PREFILL, run.simulation.prefills), (Role.DECODE, run.simulation.decodes)):
        yield from zip(simulated, run.router.instances[role], strict=True)


def served(setup: Setup, requests: list[TraceRequest]) -> PolicyRecord:
    return record(setup, requests, {})


@pytest.mark.parametrize("policy", [*POLICIES, *RIVALS])
def test_every_policy_replays_and_nothing_is_left_over(policy: str) -> None:
    small = replace(ENGINE, kv_tokens=400 * 512)
    setup = setup_of(4, 3, policy, prefill=small, decode=small)
    run = replay(setup, CHATS)
    assert sorted(each.number for each in run.outcome.requests) == list(range(len(CHATS)))
    for simulated, instance in both_views(run):
        book = instance.load
        assert (book.requests, book.tokens, book.prompts, len(simulated.decoding)) == (0, 0, 0, 0)
        assert instance.events.num_blocks == len(simulated.cache) <= 400, "the index knows what the cache holds"
        assert simulated.cache.used_tokens == pytest.approx(0.0, abs=1e-6)
        assert run.router.index.num_pending(instance.events.slot) == 0
    for each in run.outcome.requests:
        assert 0 < each.computed <= CHATS[each.number].input_tokens
        assert each.ttft_ms <= each.e2e_ms


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 6000), st.integers(1, 30), st.integers(0, 5000)),
        min_size=1,
        max_size=12,
    ),
    st.booleans(),
)
def test_a_replay_conserves_requests_and_tokens_and_keeps_to_the_bound(
    turns: list[tuple[int, int, int, int]], closed: bool
) -> None:
    requests = []
    lengths: dict[int, int] = {}
    for number, (session, more, output, delay) in enumerate(turns):
        lengths[session] = lengths.get(session, 0) + more
        names = tuple(1000 * session + at for at in range(-(-lengths[session] // 512)))
        requests.append(TraceRequest(100.0 * number, lengths[session], output, names, f"s{session}", float(delay)))
    setup = setup_of(2, 2, closed=closed)
    run = replay(setup, requests)
    assert len(run.outcome.requests) == len(requests)
    computed = sum(engine.use.prompt_tokens for engine, _ in both_views(run))
    assert computed == sum(each.computed for each in run.outcome.requests)
    least = bound_ms(setup, requests)
    assert sum(least) <= sum(each.ttft_ms for each in run.outcome.requests) + 1e-6
    if closed:
        ends: dict[str, float] = {}
        for each in sorted(run.outcome.requests, key=lambda each: each.number):
            request = requests[each.number]
            began = each.began_s
            if request.session in ends:
                assert began == pytest.approx(ends[request.session] + (request.delay_ms or 0.0) / 1000)
            ends[request.session] = began + each.e2e_ms / 1000


def test_in_a_closed_loop_a_session_waits_for_its_answers() -> None:
    turns = [TraceRequest(float(n), 512 * (n + 1), 100, tuple(range(n + 1)), "s", 1000.0) for n in range(3)]
    open_loop, closed = (replay(setup_of(1, 1, closed=each), turns).outcome for each in (False, True))
    assert closed.seconds > 2.0 + 3 * 100 * ENGINE.decode.fixed_s > open_loop.seconds
    for outcome in (closed, open_loop):  # of turns that overlap, the later ones wait for the blocks of the first one
        assert [each.computed for each in outcome.requests] == [512, 512, 512]


def test_a_prompt_on_a_decode_instance_delays_the_streams_there() -> None:
    stream = TraceRequest(0.0, 512, 400, (0,))
    prompt = TraceRequest(1000.0, 40_000, 1, tuple(range(1, 80)))
    alone, beside, apart = (
        replay(setup_of(1, 1, threshold=threshold), requests).outcome
        for threshold, requests in ((10**9, [stream]), (10**9, [stream, prompt]), (0, [stream, prompt]))
    )
    slow, quick, undisturbed = (
        next(each.e2e_ms for each in outcome.requests if each.number == 0) for outcome in (beside, alone, apart)
    )
    assert slow > 1.2 * quick, "what decode computes itself, its streams wait for"
    assert undisturbed == pytest.approx(quick, rel=0.05)


def test_a_replay_is_the_same_every_time_and_one_instance_finds_all() -> None:
    runs = [replay(setup_of(3, 2, seed=5), CHATS).outcome for _ in range(2)]
    assert runs[0].requests == runs[1].requests
    apart = [replace(chat, at_ms=20 * chat.at_ms) for chat in CHATS]
    possible = 1 - sum(fresh_tokens(apart)) / sum(chat.input_tokens for chat in apart)
    assert served(setup_of(1, 1, threshold=0), apart).hit_rate == pytest.approx(possible, abs=1e-6)


def test_the_default_keeps_hits_and_balance_on_conversations() -> None:
    found = {name: served(setup_of(policy=name), CHATS) for name in ("match_minus_load", "round_robin")}
    possible = 1 - sum(fresh_tokens(CHATS)) / sum(chat.input_tokens for chat in CHATS)
    assert found["match_minus_load"].hit_rate > 0.9 * possible
    assert found["match_minus_load"].hit_rate > found["round_robin"].hit_rate + 0.1
    assert found["match_minus_load"].load_max_over_mean < 1.4
    assert found["match_minus_load"].ttft_ms["mean"] < found["round_robin"].ttft_ms["mean"]


def test_the_default_gives_slow_instances_less() -> None:
    requests = generate(GeneratorOptions(requests=600, prefixes=50, rate=12, seed=2))
    run = replay(setup_of(slow=1), requests)
    slow, *others = [x.use.prompt_tokens for x in run.simulation.prefills]
    assert slow < 0.7 * min(others)


def test_nobody_waits_for_ever_and_nobody_is_quick_by_serving_less() -> None:
    flood = generate(GeneratorOptions(requests=300, prefixes=300, rate=60, seed=4))
    setup = setup_of(1, 1, "least_loaded", max_inflight=8, patience_s=2.0)
    found = served(setup, flood)
    assert 0.1 < found.given_up_share < 1.0
    run = replay(setup, flood)
    assert len(run.outcome.requests) + len(run.outcome.given_up_ms) == len(flood)
    assert min(run.outcome.given_up_ms) > 2000.0
    assert all(instance.load.requests == 0 for _, instance in both_views(run))


def test_the_bound_is_that_of_one_server_and_of_each_request() -> None:
    assert mean_shortest_first([0.0, 0.0, 1.0], [3.0, 1.0, 1.0]) == pytest.approx((5 + 1 + 1) / 3)
    assert fresh_tokens([CHATS[0], CHATS[0]]) == [CHATS[0].input_tokens, 512]
    loose = setup_of(8, 8)
    one = [CHATS[0]]
    cost = ENGINE.prefill.prompt(CHATS[0].input_tokens)
    assert bound_ms(loose, one) == [pytest.approx(1000 * cost)]
    long = replace(CHATS[0], input_tokens=20_000, blocks=tuple(range(40)))
    alone = replay(replace(loose, deployment=replace(loose.deployment, threshold=1 << 30)), [long])
    assert bound_ms(loose, [long]) == [pytest.approx(alone.outcome.requests[0].ttft_ms, rel=0.01)]
    flood = [replace(chat, at_ms=0.0, blocks=(n,), input_tokens=512) for n, chat in enumerate(CHATS)]
    crowded = bound_ms(setup_of(1, 1), flood)
    assert math.fsum(crowded) > 10 * math.fsum(bound_ms(setup_of(512, 512), flood))


# --- rivals ---


def side_of(role: Role, matched: list[float], work: list[float], requests: list[int]) -> Side:
    """Return instances that hold leading tokens of a prompt of 1000, with work and requests in flight."""
    trackers = []
    for count in requests:
        tracker = LoadTracker(role)
        tracker.requests = count
        trackers.append(tracker)
    ids = [InstanceId(f"i{at}") for at in range(len(matched))]
    rates = [each / 1000 for each in matched]
    return Side(role, ids, matched, rates, work, work, 1000.0, trackers)  # type: ignore[arg-type]


def scores_of(name: str, role: Role, matched: list[float], work: list[float], requests: list[int]) -> list[float]:
    """Return a rival's scores of instances of one role for a prompt of 1000 tokens."""
    none = side_of(Role.DECODE if role is Role.PREFILL else Role.PREFILL, [], [], [])
    side = side_of(role, matched, work, requests)
    both = (side, none) if role is Role.PREFILL else (none, side)
    ratings = RIVALS[name](Speeds()).score(Request(1000), *both)
    return (ratings.prefill if role is Role.PREFILL else ratings.decode).totals.tolist()


def test_rivals_score_as_they_have_published() -> None:
    busy = [1000.0, 0.0], [1000.0, 0.0], [1, 0]
    # The credit is the match; the agentic preset's is twice that, halved by one prompt of excess, times four.
    assert scores_of("dynamo_cost", Role.PREFILL, *busy) == pytest.approx([-1000 / 512, -1000 / 512])
    assert scores_of("dynamo_agentic", Role.PREFILL, *busy) == pytest.approx([-4 * 1000 / 512 - 2, -4 * 1000 / 512])
    assert scores_of("dynamo_lmetric", Role.PREFILL, *busy) == pytest.approx([-2 * 1000 / 512, -1000 / 512])
    assert scores_of("dynamo_cost", Role.DECODE, *busy) == pytest.approx([-2000 / 512, -1000 / 512])
    assert scores_of("production_stack", Role.DECODE, [1000.0, 0.0], [0.0, 0.0], [3, 1]) == pytest.approx([0.5, 0.5])
    sglang = scores_of("sglang_cache_aware", Role.PREFILL, [400.0, 0.0], [0.0, 0.0], [60, 0])
    assert sglang[0] > sglang[1], "above 0.3, and not unbalanced yet"
    sglang = scores_of("sglang_cache_aware", Role.PREFILL, [400.0, 0.0], [0.0, 0.0], [66, 0])
    assert sglang[1] > sglang[0]
    aibrix = [scores_of("aibrix_prefix_cache", Role.PREFILL, [400.0, 0.0], [0.0, 0.0], [n, 0]) for n in (0, 9)]
    assert aibrix[0][0] > aibrix[0][1]
    assert aibrix[1][1] > aibrix[1][0], "more than eight requests apart the fewest win"
    assert scores_of("llmd_scorer", Role.PREFILL, [1000.0, 0.0], [0.0, 0.0], [1, 0]) == pytest.approx([5.0, 4.0])


def test_bursts_keep_every_request_and_its_minute() -> None:
    squeezed = in_bursts(CHATS, 4.0)
    assert [x.blocks for x in squeezed] == [x.blocks for x in CHATS]
    assert all(x.at_ms // 60_000 == y.at_ms // 60_000 for x, y in zip(squeezed, CHATS, strict=True))
    assert max(x.at_ms % 60_000 for x in squeezed) <= 15_000


# --- the commands ---


def test_bench_router_in_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["bench", "router", "--generate", "60", "--instances", "4", "--json"]
    scenarios = ["--scenarios", "equal,unequal,bursts,bounded", "--policy", "match_minus_load,rivals,bound"]
    assert main([*flags, *scenarios, "--require-ttft", "1000", "--slo", "ttft:10s"]) == 0
    found = json.loads(capsys.readouterr().out)["scenarios"]
    assert list(found) == ["equal", "unequal", "bursts", "bounded"]
    assert (found["unequal"]["slow"], found["bounded"]["cache_blocks"]) == (1, 2000)
    assert [x["policy"] for x in found["bursts"]["policies"]] == ["match_minus_load", *RIVALS, "bound"]
    *rows, bound = found["equal"]["policies"]
    assert all(row["ttft_ms"]["mean"] >= bound["ttft_ms"]["mean"] for row in rows)
    assert all(row["goodput"] > 0 and row["sessions_per_hour"] > 0 for row in rows)
    assert main([*flags, "--policy", "match_minus_load", "--require-ttft", "0.5"]) == 3
    assert "times the mean TTFT" in capsys.readouterr().err
    assert main(["bench", "router", "--generate", "9", "--scenarios", "equal", "--policy", "dynamo_cost"]) == 0
    assert "dynamo_cost" in capsys.readouterr().out
    assert main([*flags, "--scenarios", "sunny"]) == 2


def test_bench_router_over_all_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "azure.csv").write_text(AZURE)
    write_trace(tmp_path / "agents.jsonl", [replace(chat, delay_ms=5.0) for chat in CHATS[:40]])
    (tmp_path / "notes.txt").write_text("no trace")
    flags = ["--traces", "all", "--trace-dir", str(tmp_path), "--limit", "40", "--instances", "2"]
    assert (
        main(["bench", "router", *flags, "--scenarios", "equal,open", "--policy", "match_minus_load,rivals,bound"]) == 0
    )
    table = capsys.readouterr().out
    for name in ("agents", "azure", "servegen", "shared_prefix"):
        assert name in table
    assert table.count("open") == 1, "a trace without delays has its times anyway"
    assert main(["bench", "router", *flags, "--scenarios", "equal,open", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [(cell["trace"], cell["scenario"], cell["closed"]) for cell in cells[:2]] == [
        ("agents.jsonl", "equal", True),
        ("agents.jsonl", "open", False),
    ]


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
    assert f"best possible hit rate {made['best_hit_rate']:.2%}" in table
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
        (["--generate", "5", "--instances", "0"], "instances must be between"),
        (["--generate", "5", "--traces", "all"], "--traces"),
        (["--generate", "5", "--slo", "speed:1s"], "--slo must look like"),
        (["--generate", "5", "--cache-blocks", "-1"], "cache_blocks must be at least 0"),
        (["--generate", "5", "--plot", "x.gif"], "ends in .png or .svg"),
        (["--generate", "5", "--gb-per-s", "0"], "gb_per_s must be above 0"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "router", *flags]) == 2
    assert text in capsys.readouterr().err
