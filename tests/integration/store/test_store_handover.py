"""KV through the store: what one instance saved, another loads, with the tokens of Hugging Face ``generate``."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from tests.support.equality import hf_greedy, mixed_prompts
from tests.support.models.checkpoints import make_checkpoint
from tests.support.servers.cluster import LocalCluster

from baton.api.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.rpc.channel import open_channel
from baton.types import SamplingParams
from baton_kvstore.server import KVStoreServer

NEW_TOKENS = 8
SAMPLING = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("model"), "llama")
    prompts = [prompt for prompt in mixed_prompts(3, 512) if len(prompt) > 40]
    return path, prompts, hf_greedy(path, prompts, NEW_TOKENS)


def cluster(path, store: KVStoreServer) -> LocalCluster:
    engine = EngineConfig(model=str(path), dtype="float32", kv_blocks=700, prefill_chunk=64)
    return LocalCluster(engine, WorkerConfig(kvstore=store.address), decode_pipes=(("shm",), ("tcp",)))


async def test_equality_when_the_prefill_instance_is_gone_before_decode_asks(workload, store):
    path, prompts, expected = workload
    async with cluster(path, store) as saving:
        first = await asyncio.gather(*(saving.generate(saving.decode[0], prompt, SAMPLING) for prompt in prompts))
        assert [result.token_ids for result in first] == expected
        await saving.check_integrity()
        metrics = saving.prefill[0].context.base.metrics.registry
        more = itertools.count()
        async with asyncio.timeout(240):  # blocks come while they are computed, where the store is not too slow for it
            while not metrics.get_sample_value("baton_store_followed_blocks_total"):
                prompt = [3 + (next(more) * 7 + i) % 500 for i in range(400)]
                await saving.generate(saving.decode[0], prompt, SAMPLING)
    # Everybody who computed is gone; only the store remembers.
    async with open_channel(store.address) as channel:
        info = await kvstore_pb2_grpc.KvStoreServiceStub(channel).GetStoreInfo(kvstore_pb2.GetStoreInfoRequest())
    assert info.num_blocks > 0
    async with cluster(path, store) as loading:
        for decode, pipe in zip(loading.decode, ("shm", "tcp"), strict=True):
            results = await asyncio.gather(
                *(loading.generate(decode, prompt, SAMPLING, candidates=()) for prompt in prompts)
            )
            assert [result.token_ids for result in results] == expected
            from_store = [r.trace for r in results if r.trace.path == common_pb2.PREFILL_PATH_STORE]
            assert len(from_store) > len(prompts) // 3
            assert {trace.pipe for trace in from_store} == {pipe}
            for trace in from_store:
                assert trace.cached_tokens + trace.transferred_tokens + trace.recomputed_tokens == trace.prompt_tokens
                assert trace.recomputed_tokens < trace.prompt_tokens
        await loading.check_integrity()


async def test_a_store_that_is_away_costs_no_answer(workload, store):
    path, prompts, expected = workload
    async with cluster(path, store) as running:
        await store.stop(0)
        results = await asyncio.gather(
            *(running.generate(running.decode[0], prompt, SAMPLING) for prompt in prompts[:8])
        )
        assert [result.token_ids for result in results] == expected[:8]
        await running.check_integrity()
