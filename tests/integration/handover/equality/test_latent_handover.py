"""Models with multi-head latent attention keep, move and store each token's latent and rotary key, not its heads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.equality import References, mixed_prompts
from tests.support.models.checkpoints import MLA
from tests.support.servers.cluster import LocalCluster, Result

from baton.api.v1 import common_pb2
from baton.config import EngineConfig
from baton.config.kvstore import KVStoreConfig
from baton.config.worker import WorkerConfig
from baton.kv_cache.layout import LayerShape
from baton.types import SamplingParams
from baton.worker.instance import WorkerInstance
from baton_kvstore.server import KVStoreServer

NEW_TOKENS = 12
LAYERS = 4
BLOCK = 16
ROW = MLA["kv_lora_rank"] + MLA["qk_rope_head_dim"]
TOKEN_BYTES = LAYERS * ROW * 4
"""Float32; heads would take num_heads * (nope + rope + v_dim) elements a layer, here 112 instead of 24."""
SAMPLING = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
Workload = tuple[Path, list[list[int]], list[list[int]]]

pytestmark = pytest.mark.usefixtures("warm_followers")


@pytest.fixture(scope="module")
def workload(references: References) -> Workload:
    prompts = [prompt for prompt in mixed_prompts(11, 512, count=14, longest=400) if len(prompt) > BLOCK]
    return references.checkpoint("deepseek_v3"), prompts, references.greedy("deepseek_v3", prompts, NEW_TOKENS)


def engine_config(path: Path, **changes: object) -> EngineConfig:
    return EngineConfig(model=str(path), dtype="float32", kv_blocks=300, prefill_chunk=64, **changes)  # type: ignore[arg-type]


def assert_latents(instance: WorkerInstance) -> None:
    """A rank's block is as large as latents and rotary keys are, with any number of ranks; the fingerprint says so."""
    core = instance.context.engine.core
    fingerprint = core.executor.fingerprint
    assert fingerprint.layer_shapes == (LayerShape(1, ROW, 0),) * LAYERS
    assert fingerprint.unsplit_layers == tuple(range(LAYERS))
    assert fingerprint.block_bytes == BLOCK * TOKEN_BYTES
    assert [arena.block_bytes for arena in core.shards.arenas] == [BLOCK * TOKEN_BYTES] * fingerprint.tp_size


async def generate_all(cluster: LocalCluster, decode: WorkerInstance, prompts: list[list[int]]) -> list[Result]:
    return list(await asyncio.gather(*(cluster.generate(decode, prompt, SAMPLING) for prompt in prompts)))


async def test_two_ranks_hand_over_to_one_through_every_pipe(workload: Workload) -> None:
    path, prompts, expected = workload
    kinds = ("memory", "shm", "tcp", "nixl", "gloo")
    pipes = [(kind,) for kind in kinds]
    async with LocalCluster(engine_config(path, tp=2), decode_pipes=pipes, decode_changes={"tp": 1}) as cluster:
        for instance in (*cluster.prefill, *cluster.decode):
            assert_latents(instance)
        for kind, decode in zip(kinds, cluster.decode, strict=True):
            results = await generate_all(cluster, decode, prompts)
            assert [result.token_ids for result in results] == expected
            moved = [result.trace for result in results if result.trace.kv_bytes]
            assert {trace.pipe for trace in moved} == {kind}
            assert sum(trace.transferred_tokens for trace in moved) > 500
            # Once, not once per rank; the blocks at the ends are not full.
            for trace in moved:
                assert 0 <= trace.kv_bytes - trace.transferred_tokens * TOKEN_BYTES < BLOCK * TOKEN_BYTES
        await cluster.check_integrity()


async def test_one_rank_hands_over_to_two(workload: Workload) -> None:
    path, prompts, expected = workload
    async with LocalCluster(engine_config(path), decode_pipes=[("shm", "tcp")], decode_changes={"tp": 2}) as cluster:
        results = await generate_all(cluster, cluster.decode[0], prompts)
        assert [result.token_ids for result in results] == expected
        assert any(result.trace.kv_bytes for result in results)
        await cluster.check_integrity()


@pytest_asyncio.fixture
async def store() -> AsyncIterator[KVStoreServer]:
    server = KVStoreServer(KVStoreConfig(capacity_bytes=16 * 2**20))
    await server.start()
    yield server
    await server.stop(0)


async def test_the_store_keeps_latents(workload: Workload, store: KVStoreServer) -> None:
    """Two ranks save; one that computes nothing but tails loads."""
    path, prompts, expected = workload
    use = WorkerConfig(kvstore=store.address)
    async with LocalCluster(engine_config(path, tp=2), use, decode_changes={"tp": 1}) as cluster:
        await generate_all(cluster, cluster.decode[0], prompts)
        await cluster.check_integrity()
    async with LocalCluster(engine_config(path), use, num_prefill=0) as cluster:
        decode = cluster.decode[0]
        assert_latents(decode)
        results = await generate_all(cluster, decode, prompts)
        assert [result.token_ids for result in results] == expected
        loaded = [result.trace for result in results if result.trace.path == common_pb2.PREFILL_PATH_STORE]
        assert sum(trace.transferred_tokens for trace in loaded) > 500
        assert all(trace.recomputed_tokens <= BLOCK for trace in loaded)
        await cluster.check_integrity()


async def test_host_memory_and_files_keep_latents(workload: Workload, tmp_path: Path) -> None:
    """Two ranks write files; one rank with a pool that is too small reads them, or what it keeps in host memory."""
    path, prompts, expected = workload
    files = WorkerConfig(kv_connectors=("shared_storage",), kv_connector_options=(f"shared_storage.path={tmp_path}",))
    memory = WorkerConfig(kv_connectors=("offload",), kv_connector_options=("offload.bytes=8388608",))
    async with LocalCluster(engine_config(path, tp=2), files) as saving:
        for prompt in prompts:
            await saving.generate(saving.decode[0], prompt, SAMPLING)
        await saving.settle()
    small = engine_config(path, max_model_len=40 * BLOCK)
    for use in (files, memory):
        async with LocalCluster(small, use, num_prefill=0, decode_changes={"kv_blocks": 40}) as loading:
            for _ in range(2):
                results = [await loading.generate(loading.decode[0], prompt, SAMPLING) for prompt in prompts]
                assert [result.token_ids for result in results] == expected
                await loading.settle()
            assert sum(result.trace.transferred_tokens for result in results) > 500
            await loading.check_integrity()
