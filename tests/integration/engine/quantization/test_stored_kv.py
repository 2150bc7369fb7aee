"""Engines whose KV is kept in fewer bits: the definition's tokens and logits, how much is lost, how much more fits."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.stored_kv import MODEL, add_tensors, clear_texts, greedy, kv_scales, rounded_model, texts

from baton.config import EngineConfig
from baton.engine.build import make_arena
from baton.engine.executor.base import Executor, load_executor
from baton.engine.llm import LLM
from baton.engine.runner.input_batch import ForwardBatch
from baton.errors import ConfigError
from baton.kv_cache.layout import KVLayout
from baton.types import SamplingParams
from baton_kernels.paged_attention.quantized import to_fp8

NEW_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
CLEAR = 0.03
"""By how much tokens lead, so that none hangs on the order of additions that decides how a number is rounded."""
MOST_KL = 2e-5
"""Of int8 KV to KV in float32, on baton-tiny; bfloat16 arithmetic of the model itself has 7e-5."""


def config(model: str = MODEL, **changes: Any) -> EngineConfig:
    return EngineConfig(model=model, **{"dtype": "float32", "kv_blocks": 300, "prefill_chunk": 48, **changes})


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    with rounded_model(MODEL) as model:
        return clear_texts(model, 8, NEW_TOKENS, CLEAR)


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    with rounded_model(MODEL) as model:
        return greedy(model, prompts, NEW_TOKENS)


def tokens_of(engine: EngineConfig, prompts: list[list[int]]) -> list[list[int]]:
    with LLM(engine) as llm:
        return [output.token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_backend": "torch"},
        {"packed_linears": False},
        {"block_size": 32, "prefill_chunk": 7},
        {"tp": 2},
        {"pp": 2},
    ],
    ids=str,
)
def test_tokens_are_those_of_a_model_whose_keys_and_values_are_rounded(
    changes: dict[str, Any], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert tokens_of(config(kv_dtype="int8", **changes), prompts) == expected


def logits_of(executor: Executor, tokens: list[int]) -> torch.Tensor:
    """All logits of one prompt [tokens, vocab], of a pool of its own."""
    shards = make_arena(config(kv_blocks=-(-len(tokens) // 16)), executor, private=True)
    batch = ForwardBatch(
        token_ids=np.array(tokens),
        positions=np.arange(len(tokens)),
        query_starts=np.array([0, len(tokens)], np.int32),
        context_lens=np.array([len(tokens)], np.int32),
        block_tables=np.arange(-(-len(tokens) // 16), dtype=np.int32)[None],
        logit_rows=np.arange(len(tokens)),
    )
    logits = executor.forward(batch).logits.float().clone()
    shards.close()
    return logits


def kl(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Mean divergence of other logits' distributions from the exact ones', in nats per token."""
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_int8_loses_less_than_bfloat16_arithmetic_does() -> None:
    executors = {
        name: load_executor(config(dtype=dtype, kv_dtype=kind))
        for name, dtype, kind in (
            ("exact", "float32", "auto"),
            ("int8", "float32", "int8"),
            ("bfloat16", "bfloat16", "auto"),
        )
    }
    found: dict[str, list[float]] = {"int8": [], "bfloat16": []}
    for prompt in texts(4, shortest=380, longest=400, seed=3):
        exact = logits_of(executors["exact"], prompt)
        for name, values in found.items():
            values.append(kl(exact, logits_of(executors[name], prompt)))
    divergence = {name: float(np.mean(values)) for name, values in found.items()}
    print(f"KL to float32: {divergence}")  # noqa: T201  for whoever wants the figure
    assert divergence["int8"] <= MOST_KL < divergence["bfloat16"]


def test_the_same_memory_holds_nearly_twice_the_tokens() -> None:
    shapes = load_executor(config(kv_dtype="int8")).geometry.layers
    half, whole = (KVLayout(shapes, 16, kind) for kind in ("int8", "bfloat16"))
    assert half.block_bytes <= 0.54 * whole.block_bytes  # heads of 32: scales are a sixteenth
    assert (1 << 30) // half.block_bytes >= 1.85 * ((1 << 30) // whole.block_bytes)


@pytest.mark.parametrize("skip", [("first", "last"), ("2",), ("first", "1", "2", "3", "4", "5")], ids=str)
def test_layers_that_are_left_out_stay_as_they_are(
    skip: tuple[str, ...], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    found = {}
    for changes in ({}, {"attention_backend": "torch"}, {"pp": 2}):
        found[str(changes)] = tokens_of(config(kv_dtype="int8", kv_skip_layers=skip, **changes), prompts[:4])
    plain = tokens_of(config(), prompts[:4])
    assert len(set(map(str, found.values()))) == 1
    if len(skip) == 6:  # all of them
        assert found["{}"] == plain


@pytest.mark.parametrize("architecture", ["gemma3", "gpt_oss", "mixtral", "qwen3"])
def test_other_architectures_agree_between_operators(architecture: str, tmp_path: Path) -> None:
    """Sliding windows and their block groups, sinks, soft caps, norms of heads, mixtures."""
    path = str(make_checkpoint(tmp_path / architecture, architecture))
    prompts = [[(7 * turn + 3 * i) % 480 + 8 for i in range(60 + 20 * turn)] for turn in range(4)]
    ways = [{}, {"attention_backend": "torch"}, {"layer_groups": False}]
    found = [tokens_of(config(path, kv_dtype="int8", **way), prompts) for way in ways]
    assert found[1:] == found[:1] * 2


def with_scales(tmp_path: Path, scales: dict[str, torch.Tensor]) -> str:
    """A copy of baton-tiny that has more tensors."""
    folder = shutil.copytree(MODEL, tmp_path / "model", dirs_exist_ok=True)
    return str(add_tensors(Path(folder), scales))


def scales_of(k: float | list[float], v: float | list[float]) -> dict[str, torch.Tensor]:
    return kv_scales(6, k, v)


def test_fp8_takes_the_checkpoints_scales(tmp_path: Path, prompts: list[list[int]]) -> None:
    path = with_scales(tmp_path, scales_of(0.05, 0.02))

    def rounding(x: torch.Tensor) -> torch.Tensor:
        scale = next(scales)
        each = torch.full((x.shape[1],), scale)
        return to_fp8(x.transpose(1, 2)[0], each).float().transpose(0, 1)[None] * scale

    class Alternating:
        """K's scale, then V's, as a layer asks for them."""

        def __init__(self) -> None:
            self.turn = 0

        def __iter__(self) -> Iterator[float]:
            return self

        def __next__(self) -> float:
            self.turn += 1
            return 0.05 if self.turn % 2 else 0.02

    scales = iter(Alternating())
    with rounded_model(path, rounding) as model:
        expected = greedy(model, prompts[:4], NEW_TOKENS)
    for changes in ({}, {"attention_backend": "torch"}, {"tp": 2}):
        assert tokens_of(config(path, kv_dtype="fp8_e4m3", **changes), prompts[:4]) == expected
    mine = load_executor(config(path, kv_dtype="fp8_e4m3")).fingerprint
    per_head = with_scales(tmp_path, scales_of([0.05, 0.06], [0.02, 0.02]))
    other = load_executor(config(per_head, kv_dtype="fp8_e4m3")).fingerprint
    assert len(mine.kv_scales) == 16
    assert mine.kv_scales != other.kv_scales
    assert dataclasses.replace(other, model_digest=mine.model_digest).content_key() != mine.content_key()
    assert tokens_of(config(per_head, kv_dtype="fp8_e4m3"), prompts[:2])
    assert load_executor(config(path, kv_dtype="int8")).fingerprint.kv_scales == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_dtype": "float16"}, "not for a model of float32"),
        ({"kv_dtype": "fp8_e4m3"}, "layer 0 has no k_scale"),
        ({"kv_dtype": "int8", "kv_skip_layers": ("6",)}, "layers are numbers below 6"),
        ({"kv_dtype": "int8", "kv_skip_layers": ("middle",)}, "first, last or sliding"),
        ({"kv_dtype": "bfloat16", "kv_skip_layers": ("1",)}, "quantized kv_dtype"),
    ],
    ids=str,
)
def test_what_cannot_be_names_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        load_executor(config(**changes))
    assert refused.value.field == ("kv_skip_layers" if "kv_skip_layers" in changes else "kv_dtype")


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (scales_of(0.0, 0.02), r"model.safetensors: model.layers.0.self_attn.k_scale has a scale that is no positive"),
        (scales_of(0.1, float("nan")), r"v_scale has a scale that is no positive"),
        (scales_of([0.1, 0.1, 0.1], 0.1), r"k_scale has 3 numbers for 2 KV heads"),
    ],
    ids=["zero", "nan", "heads"],
)
def test_broken_scales_name_file_and_tensor(scales: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        load_executor(config(with_scales(tmp_path, scales), kv_dtype="fp8_e4m3"))
    assert refused.value.field == "kv_dtype"


def test_latents_are_refused_by_name(tmp_path: Path) -> None:
    path = str(make_checkpoint(tmp_path / "deepseek", "deepseek_v3"))
    with pytest.raises(ConfigError, match="latent and its rotary key") as refused:
        load_executor(config(path, kv_dtype="int8"))
    assert refused.value.field == "kv_dtype"
