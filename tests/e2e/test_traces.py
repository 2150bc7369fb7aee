"""One request's trace through real processes, as a collector gets it."""

from __future__ import annotations

import itertools
import re
import secrets
import time
from collections.abc import Iterator

import grpc
import httpx
import pytest
from tests.e2e.test_up import LONG, NAME
from tests.support.servers.otlp_collector import CollectedSpan, OtlpCollector
from tests.support.servers.up import Running, running_up, start, stop

from baton.rpc.server import free_port

pytestmark = pytest.mark.slow
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
CHAIN = ("request", "generate", "remote_prefill", "prefill")
ARGS = ("--ratio", "1P1D", "--dtype", "float32", "--router-args", "--remote-prefill-threshold 64")


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as found:
        yield found


@pytest.fixture(scope="module")
def traced(model: str, collector: OtlpCollector) -> Iterator[Running]:
    env = SOON | {"BATON_OTLP_TRACES_ENDPOINT": collector.endpoint}
    with running_up(*ARGS, "--model", model, "--kvstore", env=env) as running:
        yield running


def complete(running: Running, prompt: str, traceparent: str = "") -> str:
    headers = {"traceparent": traceparent} if traceparent else {}
    body = {"model": NAME, "prompt": prompt, "max_tokens": 6, "temperature": 0}
    answer = httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=240)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def until_saved(running: Running) -> None:
    """Wait until no instance holds blocks of what it has answered, for the store to take them."""
    addresses = re.findall(r"metrics (127\.0\.0\.1:\d+/metrics)", "".join(running.lines))
    ends = time.monotonic() + 240
    while True:
        text = "".join(httpx.get(f"http://{address}", timeout=240).text for address in addresses)
        held = re.findall(r"^baton_engine_blocks_active (\S+)$", text, re.MULTILINE)
        assert len(held) == 2
        if not any(map(float, held)):
            return
        assert time.monotonic() < ends
        time.sleep(0.02)


def new_trace() -> tuple[str, str, str]:
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{span_id}-01", trace_id, span_id


def check_way(spans: dict[str, CollectedSpan], parent: str) -> None:
    """Router, decode, the call of prefill, prefill: each the parent of the next, and within its time."""
    chain = [spans[name] for name in CHAIN]
    assert [span.parent for span in chain] == [parent, *(span.span_id for span in chain[:-1])]
    assert [span.service for span in chain] == ["baton-router", "baton-decode", "baton-decode", "baton-prefill"]
    assert [span.kind for span in chain] == ["server", "server", "client", "server"]
    for outer, inner in itertools.pairwise(chain):
        assert inner.start_ns >= outer.start_ns
    request, generate, called, prefill = chain
    assert called.within(generate)
    transfer = spans["kv_transfer"]
    assert (transfer.parent, transfer.service, transfer.kind) == (generate.span_id, "baton-decode", "client")
    assert transfer.within(called)
    assert request.start_ns <= request.events["admitted"] <= request.events["placed"] <= generate.start_ns
    assert generate.events["admitted"] <= transfer.start_ns
    assert prefill.start_ns <= prefill.events["computed"] <= prefill.end_ns
    assert transfer.end_ns <= generate.events["first_token"] <= request.events["first_token"] <= request.end_ns
    assert transfer.attributes["baton.kv_bytes"] == request.attributes["baton.kv_bytes"] > 0
    assert transfer.attributes["baton.pipe"] == request.attributes["baton.pipe"]
    assert transfer.attributes["baton.exposed_us"] >= 0
    assert transfer.attributes["baton.source"] == prefill.instance == request.attributes["baton.prefill_instance"]
    assert generate.instance == request.attributes["baton.decode_instance"]
    assert request.attributes["gen_ai.request.model"] == NAME
    assert request.attributes["gen_ai.usage.output_tokens"] == 6
    assert request.attributes["gen_ai.usage.input_tokens"] == generate.attributes["baton.prompt_tokens"]
    assert not any(span.failed for span in spans.values())


def test_a_request_shows_its_way_through_all_services(traced: Running, collector: OtlpCollector) -> None:
    names = (*CHAIN, "kv_transfer", "kv_store", "kvstore.Get")
    traceparent, trace_id, caller = new_trace()
    first = complete(traced, LONG, traceparent)
    spans = collector.of_trace(trace_id, *names)
    check_way(spans, caller)
    # Then from the store: with the caches of the instances gone it is the only one that has the prompt.
    until_saved(traced)
    assert httpx.post(f"{traced.url}/reset_prefix_cache", timeout=240).status_code == 200
    traceparent, trace_id, caller = new_trace()
    assert complete(traced, LONG, traceparent) == first
    spans = collector.of_trace(trace_id, "request", "generate", "kv_store", "kvstore.Get")
    generate, load, get = spans["generate"], spans["kv_store"], spans["kvstore.Get"]
    assert (generate.parent, load.parent, get.parent) == (spans["request"].span_id, generate.span_id, generate.span_id)
    assert (get.service, load.service) == ("baton-kvstore", "baton-decode")
    assert get.within(load)
    assert load.within(generate)
    assert load.attributes["baton.path"] == "store"
    assert load.attributes["baton.kv_bytes"] > 0
    assert get.attributes["baton.blocks_found"] > 0


def test_who_is_not_sampled_by_its_caller_is_not_traced(traced: Running, collector: OtlpCollector) -> None:
    traceparent, trace_id, _ = new_trace()
    complete(traced, "unsampled", traceparent.removesuffix("01") + "00")
    sampled, sampled_id, _ = new_trace()
    complete(traced, "sampled", sampled)
    collector.of_trace(sampled_id, "request", "generate")
    assert not [span for span in collector.spans if span.trace_id == trace_id]


def test_a_collector_that_is_away_or_refuses_loses_no_request(model: str) -> None:
    port = free_port()
    running = start(*ARGS, "--model", model, env=SOON | {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"})
    try:
        answer = complete(running, LONG, new_trace()[0])
        with OtlpCollector(port) as collector:
            collector.refuse = grpc.StatusCode.PERMISSION_DENIED
            while not collector.calls:
                assert complete(running, LONG, new_trace()[0]) == answer
            collector.gate.clear()
            collector.refuse = None
            for _ in range(20):
                assert complete(running, LONG, new_trace()[0]) == answer
            collector.gate.set()
            traceparent, trace_id, caller = new_trace()
            complete(running, "# another\n" + LONG, traceparent)
            check_way(collector.of_trace(trace_id, *CHAIN, "kv_transfer"), caller)
        stop(running)  # with the collector gone once more
    finally:
        running.process.kill()
        text = running.end()
    assert text.count("does not take spans") >= 1
    assert "Traceback" not in text
