"""Recurrent states travel with a prompt's KV over every pipe and in both orders, or the prompt is computed again."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.models.architectures import VOCAB, Case, make_model
from tests.support.servers.cluster import LocalCluster, slow_steps

from baton.api.v1 import common_pb2
from baton.config import EngineConfig
from baton.config.worker import WorkerConfig
from baton.errors import ConfigError
from baton.types import Role, SamplingParams
from baton.worker.instance import WorkerInstance

pytestmark = pytest.mark.filterwarnings("ignore")

NEW_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
BLOCK = 16


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(8, VOCAB) for _ in range(count)]


PROMPTS = [tokens(length, length) for length in (1, 16, 17, 45, 96, 130)]


class Model:
    """A tiny Qwen3-Next: three layers of gated delta rule and one with attention."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model = make_model(Case("qwen3_next"), folder)

    def generate(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            output = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return list(output[0, len(prompt) :].tolist())

    def config(self, **changes: Any) -> EngineConfig:
        values = {"dtype": "float32", "kv_blocks": 300, "max_model_len": 256, "prefill_chunk": 32, **changes}
        return EngineConfig(model=str(self.folder), **values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("qwen3_next"))


@pytest.mark.parametrize("pipe", ["memory", "shm", "tcp", "nixl"])
async def test_tokens_are_those_of_generate_over_every_pipe(model: Model, pipe: str) -> None:
    async with LocalCluster(model.config(), decode_pipes=[(pipe,)]) as cluster:
        await cluster.check_handed_over(PROMPTS, GREEDY, [model.generate(prompt) for prompt in PROMPTS], pipe)
        await cluster.check_integrity()


async def test_two_on_each_side_in_both_orders(model: Model) -> None:
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


async def test_an_answer_goes_on_elsewhere_and_the_next_turn_finds_its_snapshot(model: Model) -> None:
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


async def test_a_prefill_instance_that_goes_costs_time_and_no_token(model: Model) -> None:
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


async def test_states_in_other_blocks_are_refused_by_name(model: Model) -> None:
    changes = {"block_size": 32, "kv_blocks": 150}
    async with LocalCluster(model.config(), decode_changes=changes) as cluster:
        result = await cluster.generate(cluster.decode[0], PROMPTS[3], GREEDY)
        assert result.token_ids == model.generate(PROMPTS[3])
        assert result.trace.path == common_pb2.PREFILL_PATH_LOCAL
        assert "differs in states" in " ".join(result.trace.failed_prefills)


async def test_an_instance_changes_its_role(model: Model) -> None:
    async with LocalCluster(model.config(), decode_pipes=[("shm",), ("shm",)]) as cluster:
        await cluster.decode[1].change_role(Role.PREFILL)
        result = await cluster.generate(cluster.decode[0], PROMPTS[4], GREEDY, candidates=[cluster.decode[1].address])
        assert result.token_ids == model.generate(PROMPTS[4])
        assert result.trace.path == common_pb2.PREFILL_PATH_REMOTE
        await cluster.check_integrity()


@pytest.mark.parametrize(
    ("changes", "field"), [({"kvstore": "127.0.0.1:1"}, "kvstore"), ({"kv_connectors": ("offload",)}, "kv_connectors")]
)
async def test_stores_are_refused(model: Model, changes: dict[str, Any], field: str) -> None:
    instance = WorkerInstance(Role.DECODE, WorkerConfig(**changes), model.config())
    with pytest.raises(ConfigError, match="keeps recurrent states") as refused:
        await instance.start()
    assert refused.value.field == field
