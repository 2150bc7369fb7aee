"""A conversation's second turn: the prefill instance fetches what decode holds, and computes only what is new."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.equality import hf_greedy, mixed_prompts
from tests.support.models.checkpoints import make_checkpoint
from tests.support.servers.cluster import LocalCluster

from baton.config import EngineConfig
from baton.types import SamplingParams

VOCAB = 512
GREEDY = SamplingParams(temperature=0.0, max_tokens=100)


def prompt(seed: int, length: int) -> list[int]:
    return max(mixed_prompts(seed, VOCAB, count=2, longest=length), key=len)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(params=[(16, 16), (16, 32), (32, 16)], ids=str)
async def cluster(model: Path, request: pytest.FixtureRequest) -> AsyncIterator[LocalCluster]:
    prefill_size, decode_size = request.param
    config = EngineConfig(
        model=str(model), dtype="float32", kv_blocks=200, block_size=prefill_size, prefill_chunk=64, prefix_caching=True
    )
    async with LocalCluster(config, decode_changes={"block_size": decode_size}) as cluster:
        yield cluster


async def computed(cluster: LocalCluster) -> int:
    engine = cluster.prefill[0].context.engine
    stats = await engine.call(engine.core.stats)
    return int(stats.prefill_tokens)


async def test_the_second_turn_computes_only_what_is_new(cluster: LocalCluster, model: Path) -> None:
    first = prompt(3, 150)
    answer = (await cluster.generate(cluster.decode[0], first, GREEDY)).token_ids
    second = first + answer + prompt(4, 120)
    before = await computed(cluster)
    result = await cluster.generate(cluster.decode[0], second, GREEDY)
    assert result.token_ids == hf_greedy(model, [second], 100)[0]
    new = await computed(cluster) - before
    held = result.trace.cached_tokens
    assert held > len(first)  # decode has the answer's KV too
    assert new <= len(second) - held + 32, "the prefill instance computed what decode held"
    await cluster.check_integrity()


async def test_held_blocks_that_cannot_be_fetched_are_computed(cluster: LocalCluster, model: Path) -> None:
    first = prompt(3, 150)
    answer = (await cluster.generate(cluster.decode[0], first, GREEDY)).token_ids
    second = first + answer + [9] * 80
    cluster.decode[0].context.block_server.close()
    result = await cluster.generate(cluster.decode[0], second, GREEDY)
    assert result.token_ids == hf_greedy(model, [second], 100)[0]
    await cluster.check_integrity()
