"""``baton bench serve`` without a service: prompts, arrivals, statistics, the search for the knee, comparisons."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.flags import AccessConfig
from baton.errors import ConfigError
from baton.tokenizer import Tokenizer
from baton_bench.report import Record
from baton_bench.serve import run as run_module
from baton_bench.serve.options import ServeOptions, parse_slos
from baton_bench.serve.prompts import PlannedRequest, PromptSource
from baton_bench.serve.records import FLIGHTS, KneeRecord, Sample, compare, detail, draw, keeps_up, summarize
from baton_bench.serve.run import Benchmark, Knee, Load, arrival_times, find_knee, put_load
from baton_bench.serve.targets import _Connection

MODEL = "models/baton-tiny"
DOC = Path(__file__).resolve().parents[3] / "docs" / "bench/serve.md"


def sample(*arrivals: float, number: int = 0, sent: float = 10.0, tokens: int | None = None, error: str = "") -> Sample:
    made = Sample(number, due_s=sent - 0.001, sent_s=sent, arrivals=[sent + at for at in arrivals])
    made.prompt_tokens, made.cached_tokens = 8, 4
    if error:
        made.fail(error, "so it is")
    made.finish(tokens)
    return made


# --- flags ---


def test_slos():
    assert parse_slos(["ttft:500ms", "itl:0.05s", "e2e:3"]) == {"ttft": 500.0, "itl": 50.0, "e2e": 3.0}


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:-1ms", "speed:3ms", "ttft:0ms", "ttft:1h"])
def test_slos_that_cannot_be(text):
    with pytest.raises(ConfigError) as caught:
        parse_slos([text])
    assert caught.value.field == "slo"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"url": "127.0.0.1:8000"}, "url"),
        ({"endpoint": "grpc"}, "url"),
        ({"endpoint": "chat"}, "tokenizer"),
        ({"arrival": "poisson"}, "request_rate"),
        ({"arrival": "closed", "request_rate": 2.0}, "request_rate"),
        ({"arrival": "trace"}, "arrival"),
        ({"dataset": "jsonl"}, "file"),
        ({"file": "x.jsonl"}, "file"),
        ({"range_ratio": 1.0}, "range_ratio"),
        ({"requests": 0}, "requests"),
        ({"request_rate": -1.0}, "request_rate"),
        ({"find_knee": True, "dataset": "mooncake", "file": "t", "arrival": "trace"}, "arrival"),
    ],
)
def test_options_that_cannot_work(changes: dict[str, Any], field: str):
    with pytest.raises(ConfigError) as caught:
        ServeOptions(**changes)
    assert caught.value.field == field


# --- arrivals ---


@given(
    count=st.integers(2, 200),
    rate=st.floats(0.1, 1000),
    kind=st.sampled_from(["constant", "poisson", "gamma"]),
    burstiness=st.floats(0.2, 5),
    draw_number=st.integers(0, 5),
)
def test_the_rate_is_the_one_asked_for(count, rate, kind, burstiness, draw_number):
    options = ServeOptions(arrival=kind, request_rate=rate, burstiness=burstiness)
    times = arrival_times(options, [PlannedRequest((1,), 1)] * count, rate, draw_number)
    assert times is not None
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] == pytest.approx((count - 1) / rate)
    assert times == arrival_times(options, [PlannedRequest((1,), 1)] * count, rate, draw_number)


def test_bursts():
    def variation(burstiness: float) -> float:
        options = ServeOptions(arrival="gamma", request_rate=10.0, burstiness=burstiness)
        times = arrival_times(options, [PlannedRequest((1,), 1)] * 5000, 10.0, 0)
        pauses = np.diff(times or [])
        return float(pauses.std() / pauses.mean())

    # Of a gamma distribution it is shape ** -0.5.
    assert variation(0.25) == pytest.approx(2.0, rel=0.1)
    assert variation(4.0) == pytest.approx(0.5, rel=0.1)


def test_a_trace_says_when(tmp_path):
    rows = [
        {"timestamp": 1000 + 500 * i, "input_length": 600, "output_length": 7, "hash_ids": [0, i]} for i in range(3)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    options = ServeOptions(dataset="mooncake", file=str(path), speedup=2.0)
    requests = PromptSource(options).requests(0)
    assert arrival_times(options, requests, None, 0) == [0.0, 0.25, 0.5]
    prompts = [request.prompt for request in requests]
    assert all(isinstance(prompt, tuple) and len(prompt) == 600 for prompt in prompts)
    assert prompts[0][:512] == prompts[1][:512]
    assert prompts[0][512:] != prompts[1][512:]
    assert [request.output_tokens for request in requests] == [7] * 3
    assert arrival_times(ServeOptions(max_concurrency=2), requests, None, 0) is None


def test_a_trace_with_delays_is_replayed_in_a_closed_loop(tmp_path):
    """A session's next request is sent after its last answer, however long that takes."""
    rows = [
        {"timestamp": 0, "input_length": 600, "output_length": 100, "hash_ids": [0, n], "session_id": s, "delay_ms": 1}
        for n, s in enumerate("abaab")
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    options = ServeOptions(trace=str(path), scale=0.1)
    requests = PromptSource(options).requests(0)
    assert [len(request.prompt) for request in requests] == [60] * 5
    assert {request.output_tokens for request in requests} == {10}
    assert requests[0].prompt[:51] == requests[4].prompt[:51]
    sessions = {id(request.prompt): request.session for request in requests}
    asked: list[int] = []
    open_sessions: list[str] = []

    class Slow:
        async def ask(self, request, sample) -> None:
            session = sessions[id(request.prompt)]
            assert session not in open_sessions
            open_sessions.append(session)
            asked.append(sample.number)
            for _ in range(5):
                await asyncio.sleep(0)
            open_sessions.remove(session)

    load = asyncio.run(put_load(Slow(), requests, arrival_times(options, requests, None, 0), None, lambda: None))
    assert sorted(asked) == list(range(5))
    assert [number for number in asked if number in (0, 2, 3)] == [0, 2, 3]
    assert all(sample.sent_s >= sample.due_s for sample in load.samples)


def test_warm_up_does_not_send_what_a_trace_begins_with(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}))
    source = PromptSource(ServeOptions(trace=str(path), warmup=2, isl=600))
    counted = source.requests(0)[0].prompt
    warm = [request.prompt for request in source.warmup(0)]
    assert [len(prompt) for prompt in warm] == [600, 600]
    assert all(prompt[:16] != counted[:16] for prompt in warm)


# --- prompts ---


def test_random_prompts_have_their_length_and_nothing_in_common():
    source = PromptSource(ServeOptions(requests=20, isl=40, osl=9))
    first, second, warm = source.requests(0), source.requests(1), source.warmup(0)
    assert [len(request.prompt) for request in first] == [40] * 20
    assert {request.output_tokens for request in first} == {9}
    heads = {tuple(request.prompt)[:16] for request in (*first, *second, *warm)}
    assert len(heads) == 42
    assert source.requests(0) == first
    lengths = [len(r.prompt) for r in PromptSource(ServeOptions(requests=200, isl=40, range_ratio=0.5)).requests(0)]
    assert (min(lengths), max(lengths)) == (20, 60)


def test_prompts_as_text_have_their_length_in_tokens():
    tokenizer = Tokenizer.load(MODEL)
    source = PromptSource(ServeOptions(requests=30, isl=48, tokenizer=MODEL))
    lengths = [len(tokenizer.encode(r.prompt, False)) for r in source.requests(0) if isinstance(r.prompt, str)]
    assert len(lengths) == 30
    assert abs(np.mean(lengths) - 48) < 1


def test_prefixes_are_shared():
    source = PromptSource(
        ServeOptions(dataset="shared-prefix", requests=50, num_prefixes=3, prefix_len=32, isl=8, seed=5)
    )
    prompts = [tuple(request.prompt) for request in source.requests(0)]
    assert len({prompt[:32] for prompt in prompts}) == 3
    assert len({prompt[32:] for prompt in prompts}) == 50
    assert {tuple(r.prompt)[:32] for r in source.requests(1)} == {prompt[:32] for prompt in prompts}


def test_json_lines(tmp_path):
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": "a b", "output_tokens": 3}, {"prompt": [1, 2]}, {"messages": messages, "max_tokens": 5}]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = PromptSource(ServeOptions(dataset="jsonl", file=str(path), osl=11)).requests(0)
    assert found == [PlannedRequest("a b", 3), PlannedRequest((1, 2), 11), PlannedRequest(messages, 5)]
    assert len(PromptSource(ServeOptions(dataset="jsonl", file=str(path), requests=2)).requests(0)) == 2


@pytest.mark.parametrize(("line", "says"), [('{"prompt": ""}', "needs prompt"), ("{", "no JSON"),
                                            ('{"prompt": "a", "output_tokens": 0}', "output_tokens")])  # fmt: skip
def test_wrong_lines_are_named(tmp_path, line, says):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=rf"prompts.jsonl:2.*{says}"):
        PromptSource(ServeOptions(dataset="jsonl", file=str(path)))


def test_sharegpt(tmp_path):
    def talk(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    long = "def main(): print(1) " * 60
    rows = [talk(long, "return the answer of it all"), talk("one turn"), talk("a", "b"), talk(long * 40, long)]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(rows))
    tokenizer = Tokenizer.load(MODEL)
    (found,) = PromptSource(ServeOptions(dataset="sharegpt", file=str(path), tokenizer=MODEL)).requests(0)
    assert found == PlannedRequest(long, len(tokenizer.encode("return the answer of it all")))
    for text, says in (("[1]", "conversation 0"), ("[", "is no JSON"), ('{"a": 1}', "no list")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=says):
            PromptSource(ServeOptions(dataset="sharegpt", file=str(path)))


# --- what was seen ---


def test_times_of_a_request():
    seen = sample(0.1, 0.15, 0.25, tokens=5)
    assert seen.ttft_ms == pytest.approx(100)
    assert seen.itl_ms == pytest.approx(
        [25, 25, 50, 50]
    )  # five tokens in three events: one in the first, two in the others
    assert seen.e2e_ms == pytest.approx(250)
    assert seen.tpot_ms == pytest.approx(150 / 4)
    assert seen.late_ms == pytest.approx(1)
    assert sample(0.1).tpot_ms is None
    assert sample().error == "empty answer"


def test_tokens_that_arrive_together_share_the_time_before_them():
    seen = sample(0.1, 0.2, 0.2, 0.2, 0.2, 0.3)
    assert seen.itl_ms == pytest.approx([25, 25, 25, 25, 100])
    assert sum(seen.itl_ms) == pytest.approx(seen.e2e_ms - seen.ttft_ms)
    assert sample(0.1, 0.1).itl_ms == []
    assert sample().itl_ms == []


# --- the knee ---


def answered(rate: float, count: int, capacity: float, room: int, seconds: float = 0.2) -> Load:
    """A load of a service with ``room`` requests at once, each of which takes ``seconds``, ``capacity`` per second."""
    samples, ends = [], [0.0] * room
    free_at = 0.0
    for number in range(count):
        due = number / rate
        slot = ends.index(min(ends))
        begin = max(due, ends[slot], free_at)
        free_at = begin + 1 / capacity if number >= room else begin
        ends[slot] = begin + seconds
        samples.append(Sample(number, due, due, [begin + seconds], 1))
    return Load(samples, max(ends), room, (count - 1) / rate)


@pytest.mark.parametrize(("rate", "kept"), [(20, True), (50, True), (100, False), (1000, False)])
def test_a_service_must_answer_as_fast_as_it_is_asked(rate, kept):
    record = summarize(answered(rate, 400, 60, 16), {"ttft": 60_000.0}, rate)
    assert record.attainment == 1.0
    assert keeps_up(record) is kept


async def knee_of(monkeypatch, capacity: float, room: int) -> tuple[KneeRecord, list[tuple[float, int]]]:
    """Search with 20 requests per load where all targets are always kept."""
    loads = list[tuple[float, int]]()

    async def send(target, requests, times, concurrency, on_done):
        rate = (len(times) - 1) / times[-1]
        loads.append((rate, len(requests)))
        return answered(rate, len(requests), capacity, room)

    monkeypatch.setattr(run_module, "put_load", send)
    options = ServeOptions(find_knee=True, requests=20, warmup=0, knee_max_rate=1000.0)
    records = list[Any]()
    benchmark = Benchmark(options, AccessConfig(), {"ttft": 60_000.0})
    await benchmark._find_knee(cast(Any, None), records.append, lambda what, left: None)
    return records[-1], loads


async def test_few_requests_do_not_make_a_rate_that_is_not_served(monkeypatch):
    knee, loads = await knee_of(monkeypatch, 60, 16)
    assert knee.rate is not None
    assert 50 <= knee.rate <= 60 / 0.9
    assert knee.served_share is not None
    assert knee.served_share >= 0.9
    assert max(count for _, count in loads) >= FLIGHTS * knee.rate * 0.2


async def test_a_knee_that_is_not_found(monkeypatch):
    knee, _ = await knee_of(monkeypatch, 1e-4, 1)
    assert (knee.rate, knee.served_share) == (None, None)


def test_summary_counts_what_went_wrong_and_who_kept_the_targets():
    samples = [sample(0.1, 0.2, tokens=2), sample(0.3, 0.31, tokens=2), sample(0.1, error="http 429")]
    found = summarize(Load(samples, 2.0, 2, 0.5), {"ttft": 200.0, "itl": 50.0}, 1.5)
    assert (found.completed, found.failed, found.errors) == (2, 1, {"http 429": 1})
    assert found.kept == {"ttft": pytest.approx(1 / 3, abs=1e-4), "itl": pytest.approx(1 / 3, abs=1e-4)}
    assert (found.goodput, found.attainment) == (0.0, 0.0)
    assert (found.input_tokens, found.cached_tokens, found.output_tokens) == (16, 8, 4)
    assert found.requests_per_s == 1.0
    assert found.ttft_ms is not None
    assert found.ttft_ms.mean == pytest.approx(200)
    assert summarize(Load(samples, 2.0, 2, 0.5), {"ttft": 200.0}, None).goodput == 0.5
    assert summarize(Load(samples, 2.0, 2, 0.5), {}, None).goodput is None


def test_an_itl_target_is_kept_by_95_of_100_gaps():
    ends = np.cumsum([0.1] + [0.01] * 96 + [0.5] * 4)
    assert sample(*ends).keeps("itl", 20.0)
    assert not sample(*np.cumsum([0.1] + [0.01] * 90 + [0.5] * 10)).keeps("itl", 20.0)
    assert sample(0.1).keeps("itl", 1.0)


@given(
    text=st.lists(st.sampled_from(["a", "ü", "{}", "x" * 50]), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 600)),
)
def test_events_are_the_same_however_they_are_cut(text, cuts):
    body = "".join(f": note\r\ndata: {word}\r\n\r\n" if i % 2 else f"data: {word}\n\n" for i, word in enumerate(text))
    data = body.encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    found: list[str] = []
    connection = _Connection()
    connection._reset(lambda event, _: found.append(event.decode()))
    whole = head + data
    places = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    for start, end in itertools.pairwise(places):
        connection.data_received(whole[start:end])
    assert found == text


# --- the knee ---


@given(limit=st.floats(0.01, 900), start=st.floats(0.05, 500))
async def test_the_knee_is_found(limit, start):
    async def keeps(rate: float) -> bool:
        return rate <= limit

    found = await find_knee(keeps, start=start, most=1024.0, precision=0.05)
    assert found.rate is not None
    assert found.broke_at is not None
    assert found.rate <= limit < found.broke_at
    assert found.broke_at - found.rate <= 0.05 * found.rate
    assert found.tried < 40


async def test_no_knee():
    async def always(rate: float) -> bool:
        return True

    async def never(rate: float) -> bool:
        return False

    assert await find_knee(always, start=3.0, most=40.0, precision=0.1) == Knee(40.0, None, 5)
    found = await find_knee(never, start=None, most=40.0, precision=0.1)
    assert found.rate is None


# --- files ---


def test_comparison(tmp_path):
    slos = {"ttft": 200.0}
    files = []
    for name, ttft in (("a", 0.1), ("b", 0.05)):
        record: Record = summarize(Load([sample(ttft, ttft + 0.1, tokens=2)], 1.0, 1, 0.1), slos, None)
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(record.to_json() + "\n")
    rows = {row["name"]: row for row in compare(*files)["rows"]}
    assert rows["TTFT mean, ms"] == {
        "name": "TTFT mean, ms", "first": 100.0, "second": 50.0, "ratio": 0.5, "better": True,
    }  # fmt: skip
    assert rows["output tokens/s"]["better"] is None
    files[0].write_text('{"record": "serve"}')
    with pytest.raises(ConfigError, match="another version"):
        compare(*files)
    files[0].write_text('{"record": "run"}')
    with pytest.raises(ConfigError, match="no result of baton bench serve"):
        compare(*files)


def test_pictures(tmp_path):
    seen = [sample(0.1, 0.2, tokens=2), sample(0.2, 0.3, tokens=2)]
    one = summarize(Load(seen, 1.0, 1, 0.1), {"ttft": 200.0}, 2.0)
    for name, records in (("load", [one]), ("knee", [one, KneeRecord(2.0, 1.0, 2.0, None, 0.9, 1)])):
        draw(records, seen, tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").read_text().rstrip().endswith("</svg>")


def test_details_are_json():
    found = json.loads(detail(sample(0.1, 0.2, tokens=2), 9.0).to_json())
    assert (found["ttft_ms"], found["itl_ms"], found["due_s"]) == (100.0, [100.0], 0.999)
    failed = json.loads(detail(sample(error="cut"), 9.0).to_json())
    assert (failed["ttft_ms"], failed["error"], failed["message"]) == (None, "cut", "so it is")


def test_fields_are_documented():
    text = DOC.read_text()
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "late_ms", "goodput", "attainment", "cached_tokens"):
        assert f"`{name}`" in text, name
