"""Recurrent states travel with a prompt's KV over every pipe and in both orders, or the prompt is computed again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.models.recurrent_checkpoint import NEW_TOKENS, RecurrentCheckpoint
from tests.support.models.recurrent_checkpoint import random_tokens as tokens
from tests.support.servers.cluster import LocalCluster, slow_steps

from baton.api.v1 import common_pb2
from baton.config.worker import WorkerConfig
from baton.errors import ConfigError
from baton.types import Role, SamplingParams
from baton.worker.instance import WorkerInstance

pytestmark = pytest.mark.filterwarnings("ignore")

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
BLOCK = 16


PROMPTS = [tokens(length, length) for length in (1, 16, 17, 45, 96, 130)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RecurrentCheckpoint:
    return RecurrentCheckpoint("qwen3_next", tmp_path_factory.mktemp("qwen3_next"))


@pytest.mark.parametrize("pipe", ["memory", "shm", "tcp", "nixl"])
async def test_tokens_are_those_of_generate_over_every_pipe(model: RecurrentCheckpoint, pipe: str) -> None:
    async with LocalCluster(model.config(), decode_pipes=[(pipe,)]) as cluster:
        await cluster.check_handed_over(PROMPTS, GREEDY, [model.generate(prompt) for prompt in PROMPTS], pipe)
        await cluster.check_integrity()


async def test_two_on_each_side_in_both_orders(model: RecurrentCheckpoint) -> None:
    async with LocalCluster(model.config(), num_prefill=2, decode_pipes=[("shm",), ("tcp",)]) as cluster:

        async def run(number: int, prompt: list[int]) -> None:
            decode = cluster.decode[number % 2]
            prefilled = None
            if number % 3 == 0:
                prefilled = await cluster.prefill_first(cluster.prefill[number % 2], prompt, GREEDY)
            result = await cluster.generate(decode, prompt, GREEDY, prefilled=prefilled)
            assert result.token_ids == model.generate(prompt)
            assert result.trace.path == common_pb2.PREFILL_PATH_REMOTE
            assert result.trace.transferred_tokens > 0

        await asyncio.gather(*(run(number, tokens(30 + 5 * number, 100 + number)) for number in range(12)))
        await cluster.check_integrity()


async def test_an_answer_goes_on_elsewhere_and_the_next_turn_finds_its_snapshot(model: RecurrentCheckpoint) -> None:
    prompt = tokens(70, 5)
    expected = model.generate(prompt)
    async with LocalCluster(model.config(), decode_pipes=[("shm",), ("shm",)]) as cluster:
        result = await cluster.generate(cluster.decode[1], prompt, GREEDY, output=expected[:4])
        assert result.token_ids == expected[4:]
        assert result.trace.path == common_pb2.PREFILL_PATH_REMOTE
        turn = prompt + expected + tokens(20, 6)
        result = await cluster.generate(cluster.decode[0], turn, GREEDY)
        assert result.token_ids == model.generate(turn)
        assert result.trace.prefill_cached_tokens >= 69 // BLOCK * BLOCK
        await cluster.check_integrity()


async def test_a_prefill_instance_that_goes_costs_time_and_no_token(model: RecurrentCheckpoint) -> None:
    prompt = tokens(200, 7)
    async with LocalCluster(model.config(prefill_chunk=16), num_prefill=2) as cluster:
        slow = slow_steps(cluster.prefill[0])
        call = asyncio.create_task(cluster.generate(cluster.decode[0], prompt, GREEDY))
        engine = cluster.prefill[0].context.engine
        async with asyncio.timeout(240):
            while not (await engine.call(engine.core.stats)).num_running:
                await asyncio.sleep(0.01)
        await cluster.prefill[0].stop(0)
        slow.clear()
        assert (await call).token_ids == model.generate(prompt)
        del cluster.prefill[0]
        await cluster.check_integrity()


async def test_states_in_other_blocks_are_refused_by_name(model: RecurrentCheckpoint) -> None:
    changes = {"block_size": 32, "kv_blocks": 150}
    async with LocalCluster(model.config(), decode_changes=changes) as cluster:
        result = await cluster.generate(cluster.decode[0], PROMPTS[3], GREEDY)
        assert result.token_ids == model.generate(PROMPTS[3])
        assert result.trace.path == common_pb2.PREFILL_PATH_LOCAL
        assert "differs in states" in " ".join(result.trace.failed_prefills)


async def test_an_instance_changes_its_role(model: RecurrentCheckpoint) -> None:
    async with LocalCluster(model.config(), decode_pipes=[("shm",), ("shm",)]) as cluster:
        await cluster.decode[1].change_role(Role.PREFILL)
        result = await cluster.generate(cluster.decode[0], PROMPTS[4], GREEDY, candidates=[cluster.decode[1].address])
        assert result.token_ids == model.generate(PROMPTS[4])
        assert result.trace.path == common_pb2.PREFILL_PATH_REMOTE
        await cluster.check_integrity()


@pytest.mark.parametrize(
    ("changes", "field"), [({"kvstore": "127.0.0.1:1"}, "kvstore"), ({"kv_connectors": ("offload",)}, "kv_connectors")]
)
async def test_stores_are_refused(model: RecurrentCheckpoint, changes: dict[str, Any], field: str) -> None:
    instance = WorkerInstance(Role.DECODE, WorkerConfig(**changes), model.config())
    with pytest.raises(ConfigError, match="keeps recurrent states") as refused:
        await instance.start()
    assert refused.value.field == field
