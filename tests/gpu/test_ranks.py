"""Tensor and pipeline parallelism on GPUs, over NCCL: the tokens of ``generate``, and hand-over between shapes."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.test_equality import GREEDY, NEW_TOKENS, VOCAB, on_gpu
from tests.support.equality import References, mixed_prompts
from tests.support.servers.cluster import LocalCluster

from baton.engine.llm import LLM

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_the_tokens_are_those_of_generate(
    references: References, architecture: str, tp: int, pp: int, graphs: str
) -> None:
    prompts = mixed_prompts(1, VOCAB, count=16, longest=300)
    expected = references.greedy(architecture, prompts, NEW_TOKENS)
    config = on_gpu(references.checkpoint(architecture), device="cuda", tp=tp, pp=pp, cuda_graphs=(graphs,))
    with LLM(config) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert [each.token_ids for each in llm.generate(prompts, GREEDY)] == expected
        assert ("graphs of" in llm.core.executor.description) is (graphs == "on")
        devices = [arena.memory.device for arena in llm.core.shards.arenas]  # type: ignore[attr-defined]
        assert devices == [torch.device("cuda", rank) for rank in range(2)]
        llm.core.check_integrity()


def test_the_pool_is_sized_by_the_fullest_gpu(references: References) -> None:
    config = on_gpu(references.checkpoint("llama"), device="cuda:0,cuda:1", tp=2, kv_blocks=None, max_num_seqs=512)
    with LLM(config) as llm:
        assert len({arena.num_blocks for arena in llm.core.shards.arenas}) == 1
        assert llm.core.arena.num_blocks > 100


@pytest.mark.parametrize("pipe", ["cuda_ipc", "tcp"])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 2)])
async def test_hand_over_between_shapes(references: References, prefill: int, decode: int, pipe: str) -> None:
    prompts = mixed_prompts(7, VOCAB, count=8, longest=200)
    expected = references.greedy("llama", prompts, NEW_TOKENS)
    config = on_gpu(references.checkpoint("llama"), device="cuda", tp=prefill, kv_blocks=600)
    async with LocalCluster(config, decode_pipes=[(pipe,)], decode_changes={"tp": decode}) as cluster:
        await cluster.check_handed_over(prompts, GREEDY, expected, pipe)
        await cluster.check_integrity()
