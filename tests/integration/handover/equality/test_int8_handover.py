"""int8 KV between instances, through stores, disks and files: the tokens of a single engine with int8 KV."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.models.stored_kv import MODEL, clear_texts, greedy, rounded_model, texts
from tests.support.servers.cluster import LocalCluster, Result
from tests.support.servers.redis_server import RedisServer, missing_redis

from baton.api.v1 import common_pb2
from baton.config import EngineConfig
from baton.config.kvstore import KVStoreConfig
from baton.config.worker import WorkerConfig
from baton.engine.llm import LLM
from baton.errors import ConfigError
from baton.types import SamplingParams
from baton_kvstore.server import KVStoreServer

pytestmark = pytest.mark.timeout(900)

NEW_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
CLEAR = 0.05
"""By how much tokens lead that are compared where KV was rounded to bfloat16 on its way."""
INT8_CLEAR = 0.03
"""The same where it was rounded once, to int8, and batches are made up as requests arrive."""
SMALL_POOL = 12
"""Blocks that hold one of the prompts, and hardly another."""
INT8 = EngineConfig(model=MODEL, dtype="float32", kv_dtype="int8", kv_blocks=300, prefill_chunk=48)
OFFLOAD = f"offload.bytes={64 << 20}"
"""Instead of a gigabyte, which each instance takes as it starts."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    with rounded_model(MODEL) as model:
        return clear_texts(model, 8, NEW_TOKENS, INT8_CLEAR, seed=1)


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    """What a single engine with int8 KV gives."""
    with LLM(INT8) as llm:
        return [output.token_ids for output in llm.generate(prompts, GREEDY)]


async def run(cluster: LocalCluster, prompts: list[list[int]], decode: int = 0, **options: Any) -> list[Result]:
    generate = cluster.generate
    return await asyncio.gather(*(generate(cluster.decode[decode], prompt, GREEDY, **options) for prompt in prompts))


def kv_bytes(results: list[Result], prompts: list[list[int]]) -> float:
    """Bytes that a transferred token took."""
    traces = [result.trace for result in results]
    assert all(trace.path == common_pb2.PREFILL_PATH_REMOTE and not trace.failed_prefills for trace in traces)
    blocks = sum(-(-len(prompt) // 16) for prompt in prompts)
    return sum(trace.kv_bytes for trace in traces) / blocks


@pytest.mark.parametrize("kinds", [("memory", "shm", "tcp"), ("nixl", "gloo")], ids="-".join)
async def test_through_every_pipe_in_half_the_bytes(
    kinds: tuple[str, ...], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    each = {}
    for kind in ("int8", "bfloat16"):
        engine = dataclasses.replace(INT8, kv_dtype=kind)
        async with LocalCluster(engine, decode_pipes=[(pipe,) for pipe in kinds]) as cluster:
            for at, pipe in enumerate(kinds):
                results = await run(cluster, prompts, at)
                if kind == "int8":
                    assert [result.token_ids for result in results] == expected, pipe
                assert {result.trace.pipe for result in results} == {pipe}
                each[kind] = kv_bytes(results, prompts)
            await cluster.check_integrity()
    assert each["int8"] <= 0.54 * each["bfloat16"]


@pytest.fixture(scope="module")
def clear_prompts() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and the tokens of each up to the first one that hangs on a rounding."""
    prompts = texts(12, seed=2)
    with rounded_model(MODEL) as model:
        return prompts, greedy(model, prompts, NEW_TOKENS, CLEAR)


@pytest.mark.parametrize("pipe", ["shm", "tcp", "nixl", "gloo"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("bfloat16", "int8"), ("int8", "bfloat16"), ("auto", "int8"), ("int8", "auto")],
    ids=lambda kind: kind,
)
async def test_converted_on_the_way(
    prefill: str, decode: str, pipe: str, clear_prompts: tuple[list[list[int]], list[list[int]]]
) -> None:
    """Activations are float32 on both sides; KV is bfloat16 or float32 (auto) on one and int8 on the other."""
    prompts, expected = clear_prompts
    if pipe != "shm":
        prompts, expected = prompts[:4], expected[:4]
    engine = dataclasses.replace(INT8, kv_dtype=prefill)
    changes = {"kv_dtype": decode, "kv_cast": True, "block_size": 32, "kv_blocks": 150}
    async with LocalCluster(engine, decode_pipes=[(pipe,)], decode_changes=changes) as cluster:
        results = await run(cluster, prompts)
        for result, wanted in zip(results, expected, strict=True):
            assert result.token_ids[: len(wanted)] == wanted
        assert sum(len(wanted) for wanted in expected) >= 6 * len(prompts)  # most tokens lead by enough
        assert kv_bytes(results, prompts) > 0
        await cluster.check_integrity()


async def test_other_types_are_refused_by_field_and_flag(prompts: list[list[int]]) -> None:
    async with LocalCluster(INT8, decode_changes={"kv_dtype": "bfloat16"}) as cluster:
        result = await cluster.generate(cluster.decode[0], prompts[0], GREEDY)
        (failure,) = result.trace.failed_prefills
        assert "kv_dtype" in failure
        assert "--kv-cast" in failure
        assert result.trace.kv_bytes == 0
        await cluster.check_integrity()


@pytest.mark.parametrize("skip", [(), ("first",)], ids=str)
@pytest.mark.parametrize("sides", [(2, 1), (1, 2)], ids=str)
async def test_scales_go_with_their_head_between_parallel_shapes(
    sides: tuple[int, int], skip: tuple[str, ...], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = dataclasses.replace(INT8, tp=sides[0], kv_skip_layers=skip)
    pipes = [("shm",), ("tcp",)]
    async with LocalCluster(engine, decode_pipes=pipes, decode_changes={"tp": sides[1]}) as cluster:
        found = [[result.token_ids for result in await run(cluster, prompts[:4], at)] for at in range(2)]
        if not skip:
            assert found == [expected[:4]] * 2
        alone = await run(cluster, prompts[:4], 0, candidates=())
        assert found == [[result.token_ids for result in alone]] * 2
        await cluster.check_integrity()


async def through_store(address: str, prompts: list[list[int]], tp: int = 1) -> list[Result]:
    """Have prompts saved by one cluster, and loaded by another that has nobody to compute them."""
    use = WorkerConfig(kvstore=address)
    async with LocalCluster(INT8, use) as cluster:
        await run(cluster, prompts)
        await cluster.check_integrity()
    async with LocalCluster(dataclasses.replace(INT8, tp=tp), use, num_prefill=0) as cluster:
        results = await run(cluster, prompts)
        await cluster.check_integrity()
    whole = sum((len(prompt) - 1) // 16 * 16 for prompt in prompts)
    assert sum(result.trace.transferred_tokens for result in results) >= 0.9 * whole
    return results


@pytest.mark.parametrize("tp", [1, 2])
async def test_through_a_store_node(tp: int, prompts: list[list[int]], expected: list[list[int]]) -> None:
    server = KVStoreServer(KVStoreConfig(capacity_bytes=64 * 2**20))
    await server.start()
    results = await through_store(server.address, prompts, tp)
    assert [result.token_ids for result in results] == expected
    await server.stop(0)


async def test_through_a_store_nodes_disk(tmp_path: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    options = {"disk_path": str(tmp_path / "disk"), "disk_write": "all", "disk_sync_s": 0.05}
    server = KVStoreServer(KVStoreConfig(capacity_bytes=64 * 2**20, **options))  # type: ignore[arg-type]
    await server.start()
    async with LocalCluster(INT8, WorkerConfig(kvstore=server.address)) as cluster:
        await run(cluster, prompts)
    await server.stop(5)
    again = KVStoreServer(KVStoreConfig(capacity_bytes=64 * 2**20, **options))  # type: ignore[arg-type]
    await again.start()
    async with LocalCluster(INT8, WorkerConfig(kvstore=again.address), num_prefill=0) as cluster:
        results = await run(cluster, prompts)
        await cluster.check_integrity()
    assert [result.token_ids for result in results] == expected
    assert sum(result.trace.transferred_tokens for result in results) > 300
    await again.stop(0)


@pytest.mark.skipif(missing_redis() is not None, reason=str(missing_redis()))
async def test_through_redis(prompts: list[list[int]], expected: list[list[int]]) -> None:
    async with RedisServer() as redis:
        results = await through_store(redis.url, prompts)
    assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize("connector", ["shared_storage", "offload"])
async def test_through_files_and_host_memory(
    connector: str, tmp_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    options = (f"shared_storage.path={tmp_path / 'kv'}" if connector == "shared_storage" else OFFLOAD,)
    use = WorkerConfig(kv_connectors=(connector,), kv_connector_options=options)
    async with LocalCluster(dataclasses.replace(INT8, kv_blocks=SMALL_POOL), use, num_prefill=0) as cluster:
        for _ in range(2):  # the pool is too small for all: the second time they are loaded
            results = [await cluster.generate(cluster.decode[0], prompt, GREEDY) for prompt in prompts]
            assert [result.token_ids for result in results] == expected
            await cluster.settle()
        assert sum(result.trace.path == common_pb2.PREFILL_PATH_STORE for result in results) > len(prompts) / 2
        await cluster.check_integrity()


@pytest.mark.parametrize("where", ["node", "redis", "shared_storage", "offload"])
async def test_tiers_may_keep_int8_for_engines_that_do_not(
    where: str, tmp_path: Path, clear_prompts: tuple[list[list[int]], list[list[int]]]
) -> None:
    """What is loaded was int8 in between, which the instances declare with ``--kv-cast``."""
    if where == "redis" and missing_redis() is not None:
        pytest.skip(str(missing_redis()))
    prompts, expected = clear_prompts[0][:4], clear_prompts[1][:4]
    engine = dataclasses.replace(INT8, kv_dtype="auto", kv_cast=True)
    async with AsyncExitStack() as stack:
        use = WorkerConfig(kv_tier_dtype="int8")
        if where == "node":
            server = KVStoreServer(KVStoreConfig(capacity_bytes=64 * 2**20))
            await server.start()
            stack.push_async_callback(server.stop, 0)
            use = dataclasses.replace(use, kvstore=server.address)
        elif where == "redis":
            use = dataclasses.replace(use, kvstore=(await stack.enter_async_context(RedisServer())).url)
        else:
            options = (f"shared_storage.path={tmp_path / 'kv'}" if where == "shared_storage" else OFFLOAD,)
            use = dataclasses.replace(use, kv_connectors=(where,), kv_connector_options=options)
            engine = dataclasses.replace(engine, kv_blocks=SMALL_POOL)
        async with LocalCluster(engine, use, num_prefill=0) as cluster:
            for _ in range(2):
                results = [await cluster.generate(cluster.decode[0], prompt, GREEDY) for prompt in prompts]
                await cluster.settle()
            if where in {"node", "redis"}:
                await cluster.check_integrity()
        if where in {"node", "redis"}:  # into a pool that has nothing
            async with LocalCluster(engine, use, num_prefill=0) as cluster:
                results = await run(cluster, prompts)
                await cluster.check_integrity()
        for result, wanted in zip(results, expected, strict=True):
            assert result.token_ids[: len(wanted)] == wanted
        moved = [result.trace for result in results if result.trace.transferred_tokens]
        assert moved
        for trace in moved:  # int8 and scales: 6 layers, 2 heads of 32 for K and V, and 2 bytes for each
            assert trace.kv_bytes == trace.transferred_tokens * 6 * 2 * 2 * 34


async def test_a_tier_of_another_type_has_to_be_declared() -> None:
    with pytest.raises(ConfigError, match="needs --kv-cast") as refused:
        async with LocalCluster(INT8, WorkerConfig(kvstore="127.0.0.1:1", kv_tier_dtype="bfloat16")):
            pass
    assert refused.value.field == "kv_tier_dtype"
