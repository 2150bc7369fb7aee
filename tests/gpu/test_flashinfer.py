"""FlashInfer itself, where it is installed: the adapter against the definition, and an engine's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.kernels.test_paged_attention import TOLERANCE, make_case
from tests.support.equality import mixed_prompts
from tests.support.models.checkpoints import make_checkpoint

from baton.config import EngineConfig
from baton.engine.llm import LLM
from baton.types import SamplingParams
from baton_kernels.paged_attention import LayerPool

pytestmark = pytest.mark.timeout(900)
SEQUENCES = ((1, 1), (5, 5), (700, 1), (400, 120), (16, 16), (33, 2), (32, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", [{}, {"window": 50}, {"softcap": 4.0}], ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (5, 1), (4, 4)], ids=str)
def test_it_is_the_definition(heads: tuple[int, int], change: dict[str, float], dtype: torch.dtype) -> None:
    flashinfer = pytest.importorskip("flashinfer")
    from baton_kernels.paged_attention.flashinfer import FlashInferPagedAttention

    case = make_case(SEQUENCES, (*heads, 128, 128, 16), dtype, **change)  # type: ignore[arg-type]
    want, want_pool = case.expected()
    shape = want_pool.k.shape
    # A layer's views begin in the middle of blocks, at addresses as the pool's layout has them.
    memory = torch.zeros(shape[0], 4 * shape[1:].numel(), dtype=dtype, device="cuda")
    k, v = (memory[:, at * shape[1:].numel() :][:, : shape[1:].numel()].view(shape) for at in (1, 2))
    old = case.pool()
    k.copy_(old.k), v.copy_(old.v)
    attention = FlashInferPagedAttention(memory.device, flashinfer)
    tensors = (x.cuda() for x in (case.q, case.k, case.v))
    got = attention.run(attention.prepare(case.batch), case.spec, LayerPool(k, v), *tensors)
    assert torch.equal(k.cpu(), want_pool.k)
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=TOLERANCE[dtype])


def test_an_engine_gives_the_tokens_of_triton(tmp_path: Path) -> None:
    pytest.importorskip("flashinfer")
    path = make_checkpoint(tmp_path, "llama", dtype="float16", head_dim=64)
    prompts = mixed_prompts(3, 512, count=16, longest=300)
    tokens = []
    for backend in ("triton", "flashinfer"):
        config = EngineConfig(
            model=str(path),
            device="cuda:0",
            dtype="float16",
            kv_blocks=2000,
            prefill_chunk=64,
            attention_backend=backend,
        )
        with LLM(config) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16))
            tokens.append([each.token_ids for each in outputs])
            assert f"attention {backend}" in llm.core.executor.description
    same = sum(a == b for a, b in zip(*tokens, strict=True))  # float16: a near tie may fall the other way
    assert same >= len(prompts) - 2
