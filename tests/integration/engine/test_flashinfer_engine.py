"""``--attention-backend flashinfer``: an engine over what stands in for the library, and what is refused."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import flashinfer_stand_in
from tests.support.equality import mixed_prompts
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.engine_logits import engine_logits, plain_logits

from baton.config import EngineConfig
from baton.engine import attention
from baton.engine.attention import AttentionContext, choose_attention
from baton.engine.llm import LLM
from baton.errors import ConfigError
from baton.types import SamplingParams
from baton_kernels.paged_attention import AttentionSpec, flashinfer

VOCAB = 512
TOKENS = np.random.default_rng(5).integers(8, VOCAB, 14).tolist()
SPEC = AttentionSpec(4, 2, 64, 64, 0.125)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[flashinfer_stand_in._Wrapper]:
    """Gives engines what stands in for FlashInfer; returns the wrappers that they make."""
    monkeypatch.setattr(attention, "_flashinfer", lambda context: flashinfer_stand_in)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1 << 10)
    flashinfer_stand_in._Wrapper.made.clear()
    return flashinfer_stand_in._Wrapper.made


def config(path: Path, **changes: object) -> EngineConfig:
    values = {"device": "interpret", "dtype": "float16", "attention_backend": "flashinfer", "kv_blocks": 12}
    values |= {"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 32, **changes}
    return EngineConfig(model=str(path), **values)


def test_an_engine_attends_by_it_and_agrees_with_the_model(
    tmp_path: Path, stand_in: list[flashinfer_stand_in._Wrapper]
) -> None:
    path = make_checkpoint(tmp_path, "llama", num_hidden_layers=1, head_dim=64, num_attention_heads=2,
                           num_key_value_heads=1)  # fmt: skip
    want = plain_logits(path, TOKENS)
    got, how = engine_logits(config(path, cuda_graphs=("off",)), TOKENS)
    assert how.startswith("fused decoder, attention flashinfer")
    assert float((got - want).norm() / want.norm()) < 0.01
    stand_in.clear()
    with LLM(config(path)) as llm:
        assert "no graphs (flashinfer attention cannot be captured)" in llm.core.executor.description
        prompts = mixed_prompts(4, VOCAB, count=3, longest=10)
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        assert [len(each.token_ids) for each in outputs] == [3, 3, 3]
        llm.core.check_integrity()
    runs = {type(each).__name__[5:11]: each.runs for each in stand_in}
    assert runs["Decode"] >= 2
    assert runs["Prefil"] >= 1


def context(*specs: AttentionSpec, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> AttentionContext:
    return AttentionContext(torch.device(device), None, True, dtype, specs)


def test_without_the_library_or_a_gpu_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(attention, "import_module", missing)
    with pytest.raises(ConfigError, match="pip install flashinfer-python") as caught:
        choose_attention("flashinfer", context(SPEC))
    assert caught.value.field == "attention_backend"
    with pytest.raises(ConfigError, match="needs a GPU, not device interpret"):
        choose_attention("flashinfer", context(SPEC, device="cpu"))


def test_layers_that_it_does_not_do_are_said_and_a_model_of_them_alone_is_refused(
    stand_in: list[flashinfer_stand_in._Wrapper], caplog: pytest.LogCaptureFixture
) -> None:
    sinks = dataclasses.replace(SPEC, sinks=torch.zeros(4))
    for wrong, why in (
        (context(SPEC, dtype=torch.float32), "float32 numbers"),
        (context(sinks, sinks), "attention sinks"),
        (context(sinks, dataclasses.replace(SPEC, k_dim=80, v_dim=80)), "sinks and heads of 80 and 80 elements"),
    ):
        with pytest.raises(ConfigError, match=why) as caught:
            choose_attention("flashinfer", wrong)
        assert caught.value.field == "attention_backend"
    with caplog.at_level(logging.WARNING):
        found = choose_attention("flashinfer", context(SPEC, sinks, SPEC, device="cpu"))
    assert found.name == "flashinfer"
    assert "attention in 1 of 3 layers by triton: flashinfer does not do attention sinks" in caplog.text
