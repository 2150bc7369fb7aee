"""Prefill and decode services on their own: leases, refusals, aborts, drains. Nothing may leak on any way out."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import sys

import grpc
import grpc.aio
import pytest
from tests.support.models.checkpoints import make_checkpoint
from tests.support.servers.cluster import LocalCluster, slow_steps

from baton.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.errors import FingerprintMismatchError, InvalidRequestError, QueueFullError, UnavailableError
from baton.rpc.channel import open_channel
from baton.rpc.convert import fingerprint_to_pb, sampling_to_pb
from baton.rpc.errors import from_rpc_error
from baton.token_ids import pack_ids
from baton.types import SamplingParams
from baton.worker.instance import WorkerInstance

GREEDY = sampling_to_pb(SamplingParams(temperature=0.0, max_tokens=5))
PROMPT = [(11 * i) % 400 + 10 for i in range(200)]
BLOCKS = 13  # of 16 tokens, for the 200 of the prompt

KILLED_CLIENT = """
import sys, threading, grpc
from baton.api.v1 import worker_pb2, worker_pb2_grpc
stub = worker_pb2_grpc.WorkerServiceStub(grpc.insecure_channel(sys.argv[1]))
call = stub.Generate(worker_pb2.GenerateRequest.FromString(sys.stdin.buffer.read()))
next(call)
print("first tokens", flush=True)
threading.Event().wait()
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture
async def cluster(path, request):
    """A small cluster; a test's parameter is how many seconds leases last there."""
    engine = EngineConfig(model=path, dtype="float32", kv_blocks=100, prefill_chunk=64, max_queue=4)
    config = WorkerConfig(lease_s=getattr(request, "param", 3600.0), max_leases=3)
    async with LocalCluster(engine, config) as running:
        yield running
        await settle(running)


async def settle(cluster: LocalCluster, timeout_s: float = 240.0) -> None:
    """Everything must be free long before any lease ends, and add up."""
    async with asyncio.timeout(timeout_s):
        while True:
            engines = [instance.context.engine for instance in (*cluster.prefill, *cluster.decode)]
            if not any([(await e.call(e.core.stats)).blocks_active for e in engines]):
                break
            await asyncio.sleep(0.01)
    await cluster.check_integrity()


def prefill_request(instance: WorkerInstance, **changes) -> worker_pb2.PrefillRequest:
    values = {
        "request_id": "p",
        "prompt_token_ids": pack_ids(PROMPT),
        "sampling": GREEDY,
        "fingerprint": fingerprint_to_pb(instance.context.base.model.executor.fingerprint),
        **changes,
    }
    return worker_pb2.PrefillRequest(**values)


async def read_to_result(call) -> list[worker_pb2.PrefillResponse]:
    responses = []
    while True:
        response = await call.read()
        responses.append(response)
        if response.WhichOneof("event") == "result":
            return responses


async def refusal(call) -> Exception:
    try:
        while await call.read() is not grpc.aio.EOF:
            continue
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call was not refused")


async def active(instance: WorkerInstance) -> int:
    engine = instance.context.engine
    return (await engine.call(engine.core.stats)).blocks_active


async def test_a_stream_cancelled_while_it_waits_for_an_offer_ends_quietly(cluster, caplog):
    prefill = cluster.prefill[0]
    async with open_channel(prefill.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        for at in range(10):
            call = stub.Prefill(prefill_request(prefill, request_id=f"p{at}", cache_salt=str(at)))
            assert (await call.read()).WhichOneof("event") == "accepted"
            call.cancel()
            await settle(cluster)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def offers_of(responses):
    """Offers of blocks that are being computed, and of complete ones."""
    offers = [r.offer for r in responses if r.WhichOneof("event") == "offer"]
    early = [offer for offer in offers if offer.HasField("ready")]
    return early, [offer for offer in offers if not offer.HasField("ready")]


async def test_the_stream_is_the_lease(cluster):
    prefill = cluster.prefill[0]
    async with open_channel(prefill.address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Prefill(prefill_request(prefill))
        responses = await read_to_result(call)
        kinds = [response.WhichOneof("event") for response in responses]
        assert kinds[0] == "accepted"
        assert kinds[-1] == "result"
        early, complete = offers_of(responses)
        assert len(complete) >= 3  # one per chunk of 64
        for offers in (early, complete):
            offered = [i for offer in offers for i in offer.block_ids]
            assert len(offered) == len(set(offered)) == BLOCKS
        assert [offer.ready for offer in early] == sorted({offer.ready for offer in early})
        assert await active(prefill) == BLOCKS
        call.cancel()
    await settle(cluster)


async def test_held_tokens_are_not_offered(cluster):
    prefill = cluster.prefill[0]
    async with open_channel(prefill.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        call = stub.Prefill(prefill_request(prefill, num_held_tokens=64))
        for offers in offers_of(await read_to_result(call)):
            assert min(offer.first_block for offer in offers if offer.block_ids) == 4
            assert sum(len(offer.block_ids) for offer in offers) == BLOCKS - 4
        call.cancel()


@pytest.mark.parametrize("cluster", [1.0], indirect=True)
async def test_a_lease_that_nobody_closes_ends_by_itself(cluster):
    prefill = cluster.prefill[0]
    prefill._role._producer._lease_s = 3600.0  # offers must not run out where a busy machine computes slowly
    async with open_channel(prefill.address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Prefill(prefill_request(prefill))
        await read_to_result(call)
        error = await refusal(call)
        assert "lease" in str(error)
        await settle(cluster)


async def test_too_many_leases_are_refused(cluster):
    prefill = cluster.prefill[0]
    async with open_channel(prefill.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        calls = [stub.Prefill(prefill_request(prefill, request_id=f"p{i}")) for i in range(3)]
        for call in calls:
            await read_to_result(call)
        error = await refusal(stub.Prefill(prefill_request(prefill, request_id="p3")))
        assert isinstance(error, QueueFullError)
        assert error.retry_after_s
        for call in calls:
            call.cancel()


@pytest.mark.parametrize(
    ("field", "value"), [("model_digest", "x"), ("kv_dtype", "bfloat16"), ("tp_size", 5), ("layout", "other")]
)
async def test_a_reader_with_other_kv_is_refused_by_the_field(cluster, field, value):
    prefill = cluster.prefill[0]
    other = fingerprint_to_pb(dataclasses.replace(prefill.context.base.model.executor.fingerprint, **{field: value}))
    async with open_channel(prefill.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        error = await refusal(stub.Prefill(prefill_request(prefill, fingerprint=other)))
    assert isinstance(error, FingerprintMismatchError)
    assert error.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_token_ids": b""}, "prompt_token_ids"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 300}, "request_id"),
        ({"num_held_tokens": 200}, "num_held_tokens"),
        ({"session_key": bytes(17)}, "session_key"),
        ({"num_output_tokens": 200}, "num_output_tokens"),
        ({"prompt_token_ids": pack_ids([10, 999_999])}, None),
        ({"sampling": common_pb2.SamplingParams(top_p=3.0)}, None),
    ],
)
async def test_a_wrong_prefill_is_refused_before_it_takes_a_block(cluster, changes, field):
    prefill = cluster.prefill[0]
    async with open_channel(prefill.address) as channel:
        error = await refusal(worker_pb2_grpc.WorkerServiceStub(channel).Prefill(prefill_request(prefill, **changes)))
    assert isinstance(error, InvalidRequestError)
    assert error.field if field is None else error.field == field
    assert await active(prefill) == 0


async def test_a_conversations_key_reaches_the_pools_of_both_instances(cluster):
    sampling = sampling_to_pb(SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    async with open_channel(cluster.decode[0].address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        async for _ in stub.Generate(generate_request(cluster, sampling=sampling, session_key=b"8 bytes!")):
            pass
        error = await refusal(stub.Generate(generate_request(cluster, session_key=bytes(17))))
        assert error.field == "session_key"
    await settle(cluster)
    for instance in (*cluster.prefill, *cluster.decode):
        core = instance.context.engine.core
        (tenant,) = core._pool._cached._tenants.values()
        assert [len(session.blocks) for session in tenant.sessions.values()] == [core.stats().blocks_cached]


async def test_roles_do_what_they_are_for(cluster):
    async with open_channel(cluster.decode[0].address) as channel:
        error = await refusal(worker_pb2_grpc.WorkerServiceStub(channel).Prefill(prefill_request(cluster.decode[0])))
        assert error.field == "role"
    async with open_channel(cluster.prefill[0].address) as channel:
        request = worker_pb2.GenerateRequest(request_id="g", prompt_token_ids=pack_ids(PROMPT), sampling=GREEDY)
        error = await refusal(worker_pb2_grpc.WorkerServiceStub(channel).Generate(request))
        assert error.field == "role"


def generate_request(cluster: LocalCluster, request_id: str = "g", **changes) -> worker_pb2.GenerateRequest:
    values = {
        "request_id": request_id,
        "prompt_token_ids": pack_ids(PROMPT),
        "sampling": sampling_to_pb(SamplingParams(temperature=0.0, max_tokens=700, ignore_eos=True)),
        "prefill_candidates": cluster.candidates,
        "remote_prefill_threshold": 1,
        **changes,
    }
    return worker_pb2.GenerateRequest(**values)


async def ended_early(instance: WorkerInstance) -> None:
    """The request was ended: it has not just come to its end."""
    engine = instance.context.engine
    assert (await engine.call(engine.core.stats)).decode_tokens < 600


@pytest.mark.parametrize("how", ["cancel", "abort"])
@pytest.mark.parametrize("after", [0, 1, 5])
async def test_whatever_ends_a_request_frees_everything(cluster, how, after):
    decode = cluster.decode[0]
    slow_steps(decode)
    channel = open_channel(decode.address)
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    call = stub.Generate(generate_request(cluster))
    if after == 0:
        await call.initial_metadata() if how == "abort" else await asyncio.sleep(0)
    for _ in range(after):
        await call.read()
    if how == "cancel":
        call.cancel()
    elif how == "abort":
        await stub.Abort(worker_pb2.AbortRequest(request_id="g"))
        if after:
            assert isinstance(await refusal(call), UnavailableError)
        call.cancel()
    await channel.close()
    await settle(cluster)
    await ended_early(decode)


async def test_a_caller_that_is_killed_frees_everything(cluster):
    slow_steps(cluster.decode[0])
    request = generate_request(cluster)
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        KILLED_CLIENT,
        cluster.decode[0].address,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    client.stdin.write(request.SerializeToString())
    client.stdin.write_eof()
    async with asyncio.timeout(240):
        assert await client.stdout.readline() == b"first tokens\n"
    assert await active(cluster.decode[0]) > 0
    client.kill()
    await client.wait()
    await settle(cluster)
    await ended_early(cluster.decode[0])


async def test_a_request_id_in_use_is_refused_and_the_first_one_goes_on(cluster):
    slow_steps(cluster.decode[0])
    async with open_channel(cluster.decode[0].address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        first = stub.Generate(generate_request(cluster))
        await first.read()
        error = await refusal(stub.Generate(generate_request(cluster)))
        assert isinstance(error, InvalidRequestError)
        assert error.field == "request_id"
        assert (await first.read()).deltas
        first.cancel()


async def test_a_full_queue_is_refused_with_a_time_to_come_back(cluster):
    async with open_channel(cluster.decode[0].address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        # 13 blocks each of 100: seven fit, four more wait.
        calls = [stub.Generate(generate_request(cluster, f"g{i}", cache_salt=str(i))) for i in range(16)]
        results = await asyncio.gather(*(call.read() for call in calls[:]), return_exceptions=True)
        errors = [from_rpc_error(r) for r in results if isinstance(r, grpc.aio.AioRpcError)]
        for call in calls:
            call.cancel()
    assert all(isinstance(error, QueueFullError) and error.retry_after_s for error in errors)


async def test_candidates_in_vain_end_in_a_local_prefill_that_says_so(cluster):
    decode = cluster.decode[0]
    sampling = SamplingParams(temperature=0.0, max_tokens=5)
    alone = await cluster.generate(decode, PROMPT, sampling, candidates=())
    result = await cluster.generate(decode, PROMPT[::-1], sampling, candidates=["127.0.0.1:1", "127.0.0.1:2"])
    assert result.trace.path == common_pb2.PREFILL_PATH_LOCAL
    assert result.trace.local_reason == "prefill_failed"
    assert len(result.trace.failed_prefills) == 2
    assert result.trace.recomputed_tokens == len(PROMPT)
    second = await cluster.generate(decode, PROMPT[5:], sampling, candidates=["127.0.0.1:1", *cluster.candidates])
    assert second.trace.path == common_pb2.PREFILL_PATH_REMOTE
    assert len(second.trace.failed_prefills) == 1
    assert len(alone.token_ids) == 5


async def test_a_draining_instance_ends_what_runs_and_takes_nothing_new(cluster):
    decode = cluster.decode[0]
    async with open_channel(decode.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        running = stub.Generate(generate_request(cluster, sampling=GREEDY))
        first = await running.read()
        drained = asyncio.ensure_future(stub.Drain(worker_pb2.DrainRequest(timeout_ms=240_000)))
        await asyncio.sleep(0)
        tokens = [token for delta in first.deltas for token in delta.token_ids]
        while (response := await running.read()) is not grpc.aio.EOF:
            tokens += [token for delta in response.deltas for token in delta.token_ids]
        assert len(tokens) == 5
        assert (await drained).num_unfinished == 0
        error = await refusal(stub.Generate(generate_request(cluster, "late")))
        assert isinstance(error, UnavailableError)


async def test_events_tell_exactly_what_is_cached(cluster):
    decode = cluster.decode[0]
    async with open_channel(decode.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        events = stub.StreamKvEvents(worker_pb2.StreamKvEventsRequest())
        held: set[bytes] = set()
        sequence = (await events.read()).batch.sequence
        sampling = SamplingParams(temperature=0.0, max_tokens=5)
        for i in range(12):  # more than the pool holds: blocks are removed too
            await cluster.generate(decode, [*PROMPT[i:], *PROMPT[:i]], sampling)
        engine = decode.context.engine
        truth = {h for event in await engine.call(engine.core.snapshot) for h in event.hashes}
        removed = 0
        async with asyncio.timeout(240):
            while held != truth:
                batch = (await events.read()).batch
                assert batch.sequence == sequence + 1
                sequence = batch.sequence
                for event in batch.events:
                    held |= set(event.stored.block_hashes)
                    held -= set(event.removed.block_hashes)
                    removed += len(event.removed.block_hashes)
        assert removed > 0
        events.cancel()


async def test_an_engine_whose_requests_all_wait_for_kv_does_not_spin(cluster):
    decode = cluster.decode[0]
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections, never says a word
    host, port = silent.getsockname()
    async with open_channel(decode.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        call = stub.Generate(generate_request(cluster, prefill_candidates=[f"{host}:{port}"]))
        reading = asyncio.ensure_future(call.read())
        async with asyncio.timeout(240):
            while not decode.context.engine.stats.num_loading:
                await asyncio.sleep(0.01)
        before = decode.context.engine.steps
        await asyncio.sleep(0.3)
        assert decode.context.engine.steps - before <= 2
        call.cancel()
        await asyncio.wait([reading])
    silent.close()
