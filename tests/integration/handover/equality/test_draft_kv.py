"""A drafter's KV goes where the blocks go: drafts behind a hand-over, a prefix hit or a store are the local ones."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.equality import References
from tests.support.models.draft_heads import write_eagle
from tests.support.models.next_token import write_next_token
from tests.support.servers.cluster import LocalCluster

from baton.config import EngineConfig
from baton.config.kvstore import KVStoreConfig
from baton.config.worker import WorkerConfig
from baton.engine.core import EngineCore
from baton.engine.llm import LLM
from baton.types import SamplingParams
from baton_kvstore.server import KVStoreServer

BLOCK, NEW_TOKENS = 16, 10
SAMPLING = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
Drafts = dict[tuple[int, ...], tuple[int, ...]]
_rng = random.Random(1)
PROMPTS = [[_rng.randrange(8, 512) for _ in range(length)] for length in (33, 50, 64, 90, 131, 200)]
"""With no prefix in common, so that all of each comes from where it should."""


@pytest.fixture(scope="module", params=["mtp", "eagle3"])
def drafting(request: pytest.FixtureRequest, references: References, tmp_path_factory: Any) -> EngineConfig:
    """A model and its drafter: one that attends over latents, and one with heads."""
    folder: Path = tmp_path_factory.mktemp("head")
    options: dict[str, Any] = {"speculative": request.param, "speculative_tokens": 2}
    if request.param == "mtp":
        model = write_next_token(folder, "deepseek_v3").folder
    else:
        model = references.checkpoint("llama")
        options["speculative_model"] = str(write_eagle(folder / "head", model, third=True))
    return EngineConfig(model=str(model), dtype="float32", kv_blocks=200, prefill_chunk=64, **options)


NONE = {"speculative": "none", "speculative_model": "", "speculative_tokens": None}


def recorded(core: EngineCore) -> Drafts:
    """Have an engine note the drafts for each beginning of a sequence."""
    assert core.speculator is not None
    drafter, drafts = core.speculator.drafter, Drafts()
    propose: Callable[[Any], Any] = drafter.propose

    def recording(wanted: Any) -> Any:
        found = propose(wanted)
        for (sequence, _), proposal in zip(wanted, found, strict=True):
            drafts[tuple(sequence.tokens.tolist())] = tuple(proposal.token_ids)
        return found

    drafter.propose = recording  # type: ignore[method-assign]
    return drafts


def share_alike(drafts: Drafts, others: Drafts) -> float:
    """Return how many draft tokens are the same, of those made for the same tokens."""
    pairs = [pair for key in drafts.keys() & others.keys() for pair in zip(drafts[key], others[key], strict=False)]
    assert len(pairs) > 2 * len(PROMPTS)
    share = sum(one == two for one, two in pairs) / len(pairs)
    print(f"{share:.3f} of {len(pairs)} draft tokens are alike")  # noqa: T201  pytest shows it with a failure
    return share


@pytest.fixture(scope="module")
def local(drafting: EngineConfig) -> tuple[list[list[int]], Drafts]:
    """Answers and drafts of an engine by itself."""
    with LLM(drafting) as llm:
        drafts = recorded(llm.core)
        return [output.token_ids for output in llm.generate(PROMPTS, [SAMPLING] * len(PROMPTS))], drafts


def context(core: EngineCore) -> tuple[int, int]:
    """Return of how many tokens the drafter's KV came, and of how many it did not."""
    assert core.speculator is not None
    return core.speculator.stats.context["known"], core.speculator.stats.context["lacking"]


async def answers(cluster: LocalCluster, at: int = 0, **options: Any) -> list[list[int]]:
    decode = cluster.decode[at]
    found = await asyncio.gather(*(cluster.generate(decode, prompt, SAMPLING, **options) for prompt in PROMPTS))
    return [each.token_ids for each in found]


async def test_prompts_come_with_the_drafters_kv(drafting: EngineConfig, local: tuple[list[list[int]], Drafts]) -> None:
    async with LocalCluster(drafting, decode_pipes=[("shm",), ("tcp",)]) as cluster:
        for at, instance in enumerate(cluster.decode):
            core = instance.context.engine.core
            drafts = recorded(core)
            assert await answers(cluster, at) == local[0]
            assert context(core) == (sum(len(prompt) - 1 for prompt in PROMPTS), 0)
            assert share_alike(drafts, local[1]) > 0.98


async def test_instances_that_draft_otherwise_or_not_exchange_the_models_kv(
    drafting: EngineConfig, local: tuple[list[list[int]], Drafts]
) -> None:
    plain = dataclasses.replace(drafting, **NONE)
    ways = {name: getattr(drafting, name) for name in NONE}
    async with LocalCluster(plain, decode_changes=ways) as cluster:
        core = cluster.decode[0].context.engine.core
        drafts = recorded(core)
        assert await answers(cluster) == local[0]
        assert context(core) == (0, sum(len(prompt) - 1 for prompt in PROMPTS))
        if drafting.speculative == "mtp":  # the other head looks little at what was before
            assert share_alike(drafts, local[1]) < 0.2
    async with LocalCluster(drafting, decode_changes=NONE) as cluster:
        assert await answers(cluster) == local[0]
        assert cluster.decode[0].context.engine.core.speculator is None


def test_what_the_prefix_cache_has_comes_with_the_drafters_kv(
    drafting: EngineConfig, local: tuple[list[list[int]], Drafts]
) -> None:
    with LLM(drafting) as llm:
        llm.generate(PROMPTS, [SAMPLING.replace(max_tokens=1)] * len(PROMPTS))
        before, _ = context(llm.core)
        drafts = recorded(llm.core)
        found = llm.generate(PROMPTS, [SAMPLING] * len(PROMPTS))
        assert [output.token_ids for output in found] == local[0]
        known, lacking = context(llm.core)
        assert known - before == sum((len(prompt) - 1) // BLOCK * BLOCK - 1 for prompt in PROMPTS)
        assert lacking == 0
        assert share_alike(drafts, local[1]) > 0.98


async def test_a_store_keeps_the_drafters_kv(drafting: EngineConfig, local: tuple[list[list[int]], Drafts]) -> None:
    store = KVStoreServer(KVStoreConfig(capacity_bytes=32 * 2**20))
    await store.start()
    try:
        use = WorkerConfig(kvstore=store.address)
        async with LocalCluster(drafting, use) as cluster:
            assert await answers(cluster) == local[0]
            await cluster.settle()
        async with LocalCluster(drafting, use, num_prefill=0) as cluster:
            core = cluster.decode[0].context.engine.core
            assert await answers(cluster) == local[0]
            known, lacking = context(core)
            assert known > sum((len(prompt) // BLOCK - 1) * BLOCK - 1 for prompt in PROMPTS)
            assert lacking == 0
    finally:
        await store.stop(0)
