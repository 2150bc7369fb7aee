"""What instances tell a collector where something fails, and where prefill comes first."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.servers.cluster import LocalCluster
from tests.support.servers.otlp_collector import OtlpCollector

from baton.api.v1 import worker_pb2, worker_pb2_grpc
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.rpc.channel import open_channel
from baton.rpc.convert import sampling_to_pb
from baton.rpc.server import free_port
from baton.token_ids import pack_ids
from baton.types import SamplingParams

MODEL = Path(__file__).resolve().parents[3] / "models" / "baton-tiny"
SAMPLING = SamplingParams(max_tokens=4, temperature=0.0, seed=5)
PROMPT = list(range(10, 110))


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpCollector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with OtlpCollector() as found:
        yield found


@pytest.fixture
async def cluster(collector: OtlpCollector) -> AsyncIterator[LocalCluster]:
    engine = EngineConfig(model=str(MODEL), dtype="float32", kv_blocks=64, max_model_len=512)
    config = WorkerConfig(otlp_traces_endpoint=collector.endpoint, remote_prefill_threshold=1)
    async with LocalCluster(engine, config) as found:
        yield found
        await found.check_integrity()


class Caller:
    """Whose span the requests are part of."""

    def __init__(self) -> None:
        self.trace_id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)
        self.context = {"traceparent": f"00-{self.trace_id}-{self.span_id}-01"}


async def generate(cluster: LocalCluster, caller: Caller, **fields: object) -> None:
    request = worker_pb2.GenerateRequest(
        request_id=secrets.token_hex(8),
        prompt_token_ids=pack_ids(PROMPT),
        sampling=sampling_to_pb(SAMPLING),
        remote_prefill_threshold=1,
        trace_context=caller.context,
        **fields,  # type: ignore[arg-type]
    )
    async with open_channel(cluster.decode[0].address) as channel:
        async for _ in worker_pb2_grpc.WorkerServiceStub(channel).Generate(request):
            pass


async def test_every_prefill_instance_that_was_asked_has_a_span(
    cluster: LocalCluster, collector: OtlpCollector
) -> None:
    caller, dead = Caller(), f"127.0.0.1:{free_port()}"
    await generate(cluster, caller, prefill_candidates=[dead, *cluster.candidates])
    spans = collector.of_trace(caller.trace_id, "generate", "remote_prefill", "prefill", "kv_transfer")
    tried = [span for span in collector.spans if span.name == "remote_prefill"]
    assert [(span.attributes["server.address"], span.failed) for span in tried] == [
        (dead, True),
        (cluster.candidates[0], False),
    ]
    assert tried[0].attributes["error.type"] == "unavailable"
    assert {span.parent for span in tried} == {spans["generate"].span_id}
    assert spans["prefill"].parent == tried[1].span_id
    (failure,) = spans["generate"].attributes["baton.failed_prefills"]
    assert failure.startswith(dead)
    assert spans["generate"].parent == caller.span_id


async def test_a_prompt_that_is_computed_first_has_a_span_of_its_own(
    cluster: LocalCluster, collector: OtlpCollector
) -> None:
    caller = Caller()
    request = worker_pb2.PrefillFirstRequest(
        request_id="first",
        prompt_token_ids=pack_ids(PROMPT),
        sampling=sampling_to_pb(SAMPLING),
        trace_context=caller.context,
    )
    async with open_channel(cluster.prefill[0].address) as channel:
        response = await worker_pb2_grpc.WorkerServiceStub(channel).PrefillFirst(request)
    waiting = worker_pb2.PrefilledPrompt(address=cluster.prefill[0].address, key=response.key)
    await generate(cluster, caller, prefilled=waiting)
    names = ("prefill_first", "generate", "remote_prefill", "prefill", "kv_transfer")
    spans = collector.of_trace(caller.trace_id, *names)
    first, prefill = spans["prefill_first"], spans["prefill"]
    assert (first.parent, first.service) == (caller.span_id, "baton-prefill")
    assert first.end_ns <= prefill.start_ns  # which hands over what was computed then
    assert first.attributes["baton.compute_us"] > 0
    assert spans["kv_transfer"].attributes["baton.kv_bytes"] > 0
    assert not any(span.failed for span in spans.values())
