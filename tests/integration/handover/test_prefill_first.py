"""Prompts that wait to be claimed: leases, bounds, claims by key and by tokens, and both sides dying in between."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest
from tests.support.equality import References, mixed_prompts
from tests.support.servers.cluster import LocalCluster

from baton.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.engine.runner.input_batch import ForwardBatch, ForwardOutput
from baton.rpc.channel import open_channel
from baton.rpc.convert import fingerprint_to_pb, sampling_to_pb
from baton.token_ids import pack_ids
from baton.types import SamplingParams
from baton.worker.instance import WorkerInstance

NEW_TOKENS = 6
LEASE_S = 3600.0
"""More than a test waits: what is given back before was not for the lease's end."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
PROMPT = mixed_prompts(3, 512, count=40, longest=160)[0:1][0] + list(range(8, 108))


@pytest.fixture
def expected(references: References) -> list[int]:
    return references.greedy("llama", [PROMPT, PROMPT[:-1]], NEW_TOKENS)[0]


def cluster(references: References, *, num_prefill: int = 1, **config: object) -> LocalCluster:
    engine = EngineConfig(
        model=str(references.checkpoint("llama")), dtype="float32", kv_blocks=64, prefill_chunk=32, prefix_caching=False
    )
    return LocalCluster(engine, WorkerConfig(**config), num_prefill=num_prefill)  # type: ignore[arg-type]


async def active_blocks(instance: WorkerInstance) -> int:
    stats = await instance.context.engine.call(instance.context.engine.core.stats)
    return stats.blocks_active


async def until_free(instance: WorkerInstance) -> None:
    async with asyncio.timeout(240):
        while await active_blocks(instance):
            await asyncio.sleep(0.01)


async def first(rig: LocalCluster, prompt: list[int], name: str = "") -> worker_pb2.PrefilledPrompt:
    return await rig.prefill_first(rig.prefill[0], prompt, GREEDY, name)


async def test_an_unclaimed_prompt_goes_by_its_lease_and_decode_computes_it(references, expected) -> None:
    async with cluster(references, lease_s=LEASE_S) as rig:
        prefilled = await first(rig, PROMPT)
        assert await active_blocks(rig.prefill[0]) == -(-len(PROMPT) // 16)
        role: Any = rig.prefill[0]._role
        role._unclaimed._buffer._clock = lambda: time.monotonic() + LEASE_S
        await until_free(rig.prefill[0])
        result = await rig.generate(rig.decode[0], PROMPT, GREEDY, prefilled=prefilled)
        assert result.token_ids == expected
        assert (result.trace.path, result.trace.local_reason) == (common_pb2.PREFILL_PATH_LOCAL, "lease_over")
        await rig.check_integrity()


@pytest.mark.parametrize("prefill_first", [False, True])
async def test_the_first_token_does_not_wait_for_a_step_of_decode(references, expected, *, prefill_first: bool) -> None:
    async with cluster(references) as rig:
        executor, may_compute = rig.decode[0].context.base.model.executor, threading.Event()
        forward = executor.forward

        def held_back(batch: ForwardBatch) -> ForwardOutput:
            assert may_compute.wait(240)
            return forward(batch)

        executor.forward = held_back  # type: ignore[method-assign]
        request = worker_pb2.GenerateRequest(
            request_id="r",
            prompt_token_ids=pack_ids(PROMPT),
            sampling=sampling_to_pb(GREEDY.replace(logprobs=1)),
            prefill_candidates=rig.candidates,
            remote_prefill_threshold=1,
            prefilled=await first(rig, PROMPT) if prefill_first else None,
        )
        try:
            async with open_channel(rig.decode[0].address) as channel:
                messages = aiter(worker_pb2_grpc.WorkerServiceStub(channel).Generate(request))
                response = await asyncio.wait_for(anext(messages), 240)
                (delta,) = response.deltas
                assert (list(delta.token_ids), delta.logprobs[0].token_id) == (expected[:1], expected[0])
                assert (response.trace.path, response.trace.ttft_us > 0) == (common_pb2.PREFILL_PATH_REMOTE, True)
                may_compute.set()
                rest = [token async for message in messages for delta in message.deltas for token in delta.token_ids]
                assert rest == expected[1:]
        finally:
            may_compute.set()
        await rig.check_integrity()


async def test_what_waits_is_bounded(references) -> None:
    blocks = -(-len(PROMPT) // 16)
    async with cluster(references, lease_s=LEASE_S, unclaimed_share=(2 * blocks + 1) / 64) as rig:
        waiting = [await first(rig, [i + 8, *PROMPT[1:]]) for i in range(2)]
        third = asyncio.create_task(first(rig, PROMPT))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(third), 0.5)
        await rig.generate(rig.decode[0], [8, *PROMPT[1:]], GREEDY, prefilled=waiting[0])
        prefilled = await asyncio.wait_for(third, 240)  # there is room now
        with pytest.raises(grpc.aio.AioRpcError, match="can never wait here"):
            await first(rig, PROMPT * 3)
        for prompt, where in (([9, *PROMPT[1:]], waiting[1]), (PROMPT, prefilled)):
            result = await rig.generate(rig.decode[0], prompt, GREEDY, prefilled=where)
            assert result.trace.path == common_pb2.PREFILL_PATH_REMOTE
        await rig.check_integrity()


@pytest.mark.parametrize("change", ["salt", "seed", "prefix", "longer"])
async def test_by_tokens_only_the_same_prompt_is_found(references, change: str) -> None:
    sampled = GREEDY.replace(temperature=1.0, seed=3)
    async with cluster(references, lease_s=LEASE_S) as rig:
        where = await rig.prefill_first(rig.prefill[0], PROMPT, sampled)
        where.key = ""
        prompt = {"prefix": PROMPT[:-1], "longer": [*PROMPT, 9]}.get(change, PROMPT)
        sampling = sampled.replace(seed=4) if change == "seed" else sampled
        request = worker_pb2.GenerateRequest(
            request_id=secrets.token_hex(8),
            prompt_token_ids=pack_ids(prompt),
            sampling=sampling_to_pb(sampling),
            cache_salt="other" if change == "salt" else "",
            prefilled=where,
        )
        async with open_channel(rig.decode[0].address) as channel:
            responses = [x async for x in worker_pb2_grpc.WorkerServiceStub(channel).Generate(request)]
        assert responses[0].trace.local_reason == "lease_over"
        result = await rig.generate(rig.decode[0], PROMPT, sampled, prefilled=where)
        assert result.trace.path == common_pb2.PREFILL_PATH_REMOTE
        await rig.check_integrity()


async def test_a_prompt_is_claimed_once(references, expected) -> None:
    async with cluster(references, lease_s=LEASE_S) as rig:
        where = await first(rig, PROMPT)
        results = await asyncio.gather(
            *(rig.generate(rig.decode[0], PROMPT, GREEDY, prefilled=where) for _ in range(4))
        )
        assert [x.token_ids for x in results] == [expected] * 4
        assert [x.trace.local_reason for x in results].count("lease_over") == 3
        await rig.check_integrity()


async def test_a_key_of_another_prompt_is_refused(references, expected) -> None:
    async with cluster(references, lease_s=LEASE_S) as rig:
        where = await first(rig, PROMPT)
        result = await rig.generate(rig.decode[0], [9, *PROMPT[1:]], GREEDY, candidates=(), prefilled=where)
        assert "names another prompt" in result.trace.failed_prefills[0]
        result = await rig.generate(rig.decode[0], PROMPT, GREEDY, prefilled=where)  # it still waits for its reader
        assert (result.token_ids, result.trace.path) == (expected, common_pb2.PREFILL_PATH_REMOTE)
        await until_free(rig.prefill[0])
        await rig.check_integrity()


async def test_a_claim_that_cannot_be_right_takes_nothing(references, expected) -> None:
    async with cluster(references, lease_s=LEASE_S) as rig:
        where = await first(rig, PROMPT)
        request = worker_pb2.PrefillRequest(
            request_id="it",
            prompt_token_ids=pack_ids(PROMPT),
            sampling=sampling_to_pb(GREEDY),
            fingerprint=fingerprint_to_pb(rig.decode[0].context.base.model.executor.fingerprint),
            num_held_tokens=len(PROMPT) + 1,
            claim=worker_pb2.PrefillClaim(key=where.key),
        )
        async with open_channel(rig.prefill[0].address) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="num_held_tokens"):
                [x async for x in worker_pb2_grpc.WorkerServiceStub(channel).Prefill(request)]
        result = await rig.generate(rig.decode[0], PROMPT, GREEDY, prefilled=where)
        assert (result.token_ids, result.trace.path) == (expected, common_pb2.PREFILL_PATH_REMOTE)
        await rig.check_integrity()


async def test_an_aborted_prompt_goes_at_once(references) -> None:
    async with cluster(references, lease_s=LEASE_S) as rig:
        await first(rig, PROMPT, "it")
        async with open_channel(rig.prefill[0].address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            assert (await stub.Abort(worker_pb2.AbortRequest(request_id="it"))).found
            await until_free(rig.prefill[0])
            assert not (await stub.Abort(worker_pb2.AbortRequest(request_id="it"))).found
        await rig.check_integrity()


async def test_a_cancelled_computation_leaves_nothing(references) -> None:
    async with cluster(references, lease_s=LEASE_S) as rig:
        tasks = [asyncio.create_task(first(rig, PROMPT)) for _ in range(3)]
        async with asyncio.timeout(240):
            while not await active_blocks(rig.prefill[0]):
                await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with open_channel(rig.prefill[0].address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            await stub.Drain(worker_pb2.DrainRequest(timeout_ms=240_000))
        # A call that was answered just before it was cancelled goes by its lease, or by the router's word.
        rig.prefill[0].context.engine.wake()
        assert await active_blocks(rig.prefill[0]) % -(-len(PROMPT) // 16) == 0


@pytest.mark.parametrize("others", [0, 1])
async def test_prefill_dies_between_its_answer_and_the_claim(references, expected, others: int) -> None:
    async with cluster(references, num_prefill=1 + others, lease_s=LEASE_S) as rig:
        where = await first(rig, PROMPT)
        dead = rig.prefill.pop(0)
        await dead.stop(0)
        result = await rig.generate(rig.decode[0], PROMPT, GREEDY, prefilled=where)
        assert result.token_ids == expected
        assert result.trace.failed_prefills[0].startswith(where.address)
        path = common_pb2.PREFILL_PATH_REMOTE if others else common_pb2.PREFILL_PATH_LOCAL
        assert result.trace.path == path
        await rig.check_integrity()


@pytest.mark.parametrize("claimed", [False, True])
async def test_decode_leaves_before_or_after_its_claim(references, claimed: bool) -> None:
    """The same as its death: what it held on the prefill instance is its stream, or nothing at all."""
    async with cluster(references, lease_s=LEASE_S if claimed else 1.0) as rig:
        where = await first(rig, PROMPT)
        if claimed:
            request = worker_pb2.PrefillRequest(
                request_id="reader",
                prompt_token_ids=pack_ids(PROMPT),
                sampling=sampling_to_pb(GREEDY),
                fingerprint=(await info(rig.decode[0])).fingerprint,
                claim=worker_pb2.PrefillClaim(key=where.key),
            )
            async with open_channel(rig.prefill[0].address) as channel:
                call = worker_pb2_grpc.WorkerServiceStub(channel).Prefill(request)
                kinds = [(await call.read()).WhichOneof("event") for _ in range(3)]
                assert kinds == ["accepted", "offer", "result"]
                assert await active_blocks(rig.prefill[0])
                call.cancel()
        await until_free(rig.prefill[0])
        await rig.check_integrity()


async def info(instance: WorkerInstance) -> worker_pb2.GetInfoResponse:
    async with open_channel(instance.address) as channel:
        response: worker_pb2.GetInfoResponse = await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(
            worker_pb2.GetInfoRequest()
        )
    return response


async def test_a_client_that_leaves_while_decode_fetches(references) -> None:
    async with cluster(references, lease_s=LEASE_S) as rig:
        for _ in range(5):
            where = await first(rig, PROMPT)
            task = asyncio.create_task(rig.generate(rig.decode[0], PROMPT, GREEDY, prefilled=where))
            await seen(lambda task=task: bool(rig.decode[0].context.engine.stats.num_loading) or task.done())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with open_channel(rig.prefill[0].address) as channel:  # what a router does
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                await stub.Abort(worker_pb2.AbortRequest(request_id=where.key))
            await until_free(rig.prefill[0])
        await rig.check_integrity()


async def seen(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0)
