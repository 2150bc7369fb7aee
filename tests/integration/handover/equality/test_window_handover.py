"""Decode instances of models with sliding windows fetch what tokens will see, and give back what they see no more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.support.equality import References, hf_greedy, mixed_prompts
from tests.support.models.checkpoints import make_checkpoint
from tests.support.servers.cluster import LocalCluster, Result

from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.engine.build import make_arena
from baton.engine.core import EngineCore
from baton.engine.executor.base import load_executor
from baton.engine.request import EngineRequest
from baton.errors import InvalidRequestError
from baton.kv_cache.connector import KVConnector, LoadPlan, LoadRequest, LoadUpdate
from baton.types import BlockId, RequestId, Role, SamplingParams
from baton.worker.instance import WorkerInstance

BLOCK, WINDOW, LAYERS, NEW_TOKENS = 16, 64, 6, 40
LAYER_BYTES = 2 * 2 * 16 * 4 * BLOCK
"""K and V of two heads of 16, float32, of the tokens of a block."""
SAMPLING = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
Workload = tuple[Path, list[list[int]], list[list[int]]]

pytestmark = pytest.mark.usefixtures("warm_followers")


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Gemma 3's shape: five windows to one layer of full attention."""
    kinds = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]
    path = make_checkpoint(
        tmp_path_factory.mktemp("model"), "gemma3", num_hidden_layers=LAYERS, layer_types=kinds, sliding_window=WINDOW
    )
    prompts = [prompt for prompt in mixed_prompts(13, 512, count=12, longest=700) if len(prompt) > 4]
    return path, prompts, hf_greedy(path, prompts, NEW_TOKENS)


def engine_config(path: Path, **changes: Any) -> EngineConfig:
    values = {"dtype": "float32", "kv_blocks": 200, "prefill_chunk": 64, **changes}
    return EngineConfig(model=str(path), **values)


async def generate_all(cluster: LocalCluster, decode: WorkerInstance, prompts: list[list[int]]) -> list[Result]:
    return list(await asyncio.gather(*(cluster.generate(decode, prompt, SAMPLING) for prompt in prompts)))


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({}, {}),
        ({"tp": 2}, {"tp": 1}),
        ({}, {"tp": 2}),
        ({"block_size": 32}, {"block_size": 16}),
        ({"pp": 2}, {"pp": 1}),
    ],
    ids=str,
)
async def test_equality_through_pipes_and_shapes(
    workload: Workload, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    path, prompts, expected = workload
    kinds = ("memory", "shm", "tcp", "nixl", "gloo") if not prefill and not decode else ("shm", "tcp")
    pipes = [(kind,) for kind in kinds] if decode.get("tp", 1) == 1 else [kinds]
    whole = {"tp": 1, "pp": 1, "block_size": BLOCK, **decode}
    async with LocalCluster(engine_config(path, **prefill), decode_pipes=pipes, decode_changes=whole) as cluster:
        for kind, instance in zip(kinds, cluster.decode, strict=False):
            fingerprint = instance.context.base.model.executor.fingerprint
            assert fingerprint.layer_groups == (1, 2, 3, 4, 5, 0)
            results = await generate_all(cluster, instance, prompts)
            assert [result.token_ids for result in results] == expected
            moved = [result.trace for result in results if result.trace.kv_bytes]
            assert {trace.pipe for trace in moved} == {kind}
            assert sum(trace.transferred_tokens for trace in moved) > 1000
        await cluster.check_integrity()


async def test_bytes_of_a_hand_over_before_and_after(workload: Workload) -> None:
    path, _, _ = workload
    prompt = [8 + (5 * i * i + i) % 500 for i in range(900)]
    (expected,) = hf_greedy(path, [prompt], NEW_TOKENS)
    found = []
    for layer_groups in (False, True):
        async with LocalCluster(engine_config(path), decode_changes={"layer_groups": layer_groups}) as cluster:
            result = await cluster.generate(cluster.decode[0], prompt, SAMPLING)
            assert result.token_ids == expected
            found.append(result.trace.kv_bytes)
            await cluster.check_integrity()
    blocks = -(-len(prompt) // BLOCK)
    seen = blocks - (len(prompt) - WINDOW) // BLOCK
    assert found == [blocks * LAYERS * LAYER_BYTES, (blocks + seen * (LAYERS - 1)) * LAYER_BYTES]
    assert found[1] < 0.3 * found[0]


async def test_conversations_and_preemption_on_decode(workload: Workload) -> None:
    """A second turn finds the first one in decode's own cache, or fetches what windows gave away."""
    path, prompts, expected = workload
    turns = [[*prompt, *answer, 9, 8] for prompt, answer in zip(prompts, expected, strict=True) if len(prompt) < 300]
    want = hf_greedy(path, turns, NEW_TOKENS)
    for kv_blocks in (200, 64):
        async with LocalCluster(engine_config(path), decode_changes={"kv_blocks": kv_blocks}) as cluster:
            decode = cluster.decode[0]
            assert [result.token_ids for result in await generate_all(cluster, decode, prompts)] == expected
            for _ in range(2):
                assert [result.token_ids for result in await generate_all(cluster, decode, turns)] == want
            await cluster.check_integrity()


async def test_what_was_not_fetched_is_not_found(workload: Workload) -> None:
    path, _, _ = workload
    prompt = [8 + (11 * i * i + i) % 500 for i in range(500)]
    branch = [*prompt[:200], 11, 12]
    async with LocalCluster(engine_config(path)) as cluster:
        decode = cluster.decode[0]
        assert (await cluster.generate(decode, prompt, SAMPLING)).trace.kv_bytes
        result = await cluster.generate(decode, branch, SAMPLING, candidates=())
        assert result.token_ids == hf_greedy(path, [branch], NEW_TOKENS)[0]
        assert result.trace.cached_tokens == 0
        await cluster.check_integrity()


async def test_what_others_read_holds_all_layers(workload: Workload) -> None:
    """Prefill instances, and whoever a store or another connector reads from; a grouped decode instance says no."""
    path, prompts, _ = workload
    offload = WorkerConfig(kv_connectors=("offload",), kv_connector_options=("offload.bytes=1048576",))
    async with LocalCluster(engine_config(path), offload) as cluster:
        for instance in (*cluster.prefill, *cluster.decode):
            assert instance.context.base.model.executor.fingerprint.layer_groups == ()
    async with LocalCluster(engine_config(path)) as cluster:
        assert cluster.prefill[0].context.base.model.executor.fingerprint.layer_groups == ()
        decode = cluster.decode[0]
        with pytest.raises(InvalidRequestError, match="no-layer-groups") as refused:
            await decode.change_role(Role.PREFILL)
        assert refused.value.field == "role"
        await decode.change_role(Role.DECODE)
        assert (await cluster.generate(decode, prompts[0], SAMPLING)).token_ids


class _Short(KVConnector):
    """Says that some tokens came, and has written nothing."""

    def __init__(self, num_valid: int) -> None:
        self._num_valid = num_valid
        self._ended: list[LoadUpdate] = []
        self.block_ids: list[tuple[BlockId, ...]] = []

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        return LoadPlan(len(request.token_ids), with_first_token=True)

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Any) -> None:
        self.block_ids.append(tuple(block_ids))
        self._ended.append(LoadUpdate(request.request_id, self._num_valid, error="the source is gone"))

    def poll_loads(self) -> list[LoadUpdate]:
        ended, self._ended = self._ended, []
        return ended

    def has_pending(self) -> bool:
        return bool(self._ended)


@pytest.mark.parametrize("num_valid", [0, 100, 140])
def test_a_load_that_falls_short_is_computed_again(references: References, num_valid: int) -> None:
    path = references.checkpoint("gemma3")
    (prompt,) = mixed_prompts(4, 512, count=1, longest=10)
    prompt = (prompt * 150)[:150]
    (want,) = references.greedy("gemma3", [prompt], NEW_TOKENS)
    config = engine_config(path)
    executor = load_executor(config)
    shards, connector = make_arena(config, executor), _Short(num_valid)
    core = EngineCore(config, executor, shards, connector=connector)
    core.add_request(EngineRequest(RequestId("a"), prompt, SAMPLING))
    got: list[int] = []
    while core.has_work():
        got += [token for output in core.step() for token in output.token_ids]
    assert got == want
    (ids,) = connector.block_ids
    full, window = ids[:10], ids[10:]
    assert -1 not in full
    assert window.index(next(block for block in window if block >= 0)) == (150 - 24) // BLOCK
    core.check_integrity()
    shards.close()
