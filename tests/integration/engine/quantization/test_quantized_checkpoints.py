"""Checkpoints of every quantized format give the logits of the plain checkpoints that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.equality import hf_greedy, mixed_prompts
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.engine_logits import engine_logits, plain_logits
from tests.support.models.quantized_checkpoints import FORMATS, QuantizedCheckpoint, Tensors, quantize_checkpoint

from baton.config import EngineConfig
from baton.engine.executor.base import load_executor
from baton.engine.llm import LLM
from baton.engine.models.fused import FusedDecoder
from baton.errors import ConfigError
from baton.types import SamplingParams

NEW_TOKENS = 12
TOKENS = np.random.default_rng(5).integers(8, 512, 45).tolist()
ROUNDING = sorted(name for name, form in FORMATS.items() if form.inputs is not None)
WIDE = {"hidden_size": 128, "intermediate_size": 256}
"""Sizes of which tensor parallelism leaves whole groups."""


def checkpoint(
    folder: Path,
    name: str,
    architecture: str = "llama",
    change: Callable[[Tensors], None] | None = None,
    skip: str = "",
    **sizes: Any,
) -> QuantizedCheckpoint:
    plain = make_checkpoint(folder / "source", architecture, **{"initializer_range": 0.1, **sizes})
    return quantize_checkpoint(plain, folder, name, change=change, skip=skip)


def config(path: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(model=str(path), **{"dtype": "float32", "kv_blocks": 40, **changes})


def check_exact(made: QuantizedCheckpoint, **changes: Any) -> str:
    """Logits without rounded inputs are those of the plain checkpoint."""
    got, how = engine_logits(config(made.folder, quantized_activations="none", **changes), TOKENS)
    torch.testing.assert_close(got, plain_logits(made.plain, TOKENS), atol=1e-3, rtol=1e-3)
    return how


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_logits_are_those_of_the_dequantized_model(tmp_path: Path, name: str) -> None:
    made = checkpoint(tmp_path, name)
    assert made.modules
    assert check_exact(made).startswith("fused decoder")


@pytest.mark.parametrize("name", ["ct-w8a16", "gptq-v1-ordered", "bnb-nf4-nested"])
def test_transformers_modules_alone_give_them_too(tmp_path: Path, name: str) -> None:
    made = checkpoint(tmp_path, name)
    assert check_exact(made, packed_linears=False).startswith("transformers' modules")


@pytest.mark.parametrize("name", ROUNDING)
def test_inputs_are_rounded_as_the_checkpoint_says(tmp_path: Path, name: str) -> None:
    """The definition's modules round what the model without Baton's code rounds; the operators to the same numbers.

    Sums that differ in their last bits may round to other numbers, and all that follows then: so the error is bounded
    by the rounding's own, and most checkpoints have none.
    """
    made, inputs = checkpoint(tmp_path, name), FORMATS[name].inputs
    exact, rounded = plain_logits(made.plain, TOKENS), plain_logits(made.plain, TOKENS, inputs, made.modules)
    rounding = (rounded - exact).norm()
    for packed, path in ((False, "transformers' modules"), (True, "fused decoder")):
        got, how = engine_logits(config(made.folder, packed_linears=packed), TOKENS)
        assert how.startswith(path)
        first = slice(0, 1)  # a token that no other one's rounding reaches
        assert min((got - rounded)[first].norm(), (got - rounded).norm()) < 0.1 * rounding
        assert (got - rounded).norm() < 1.6 * rounding


MIXTURES = [
    ("mixtral", "ct-w4a16"),
    ("mixtral", "bnb-nf4"),
    ("qwen3_moe", "fp8-block"),
    ("qwen3_moe", "gptq-v2"),
    ("deepseek_v3", "ct-w8a16"),
    ("gpt_oss", "mxfp4"),
    ("phi3", "ct-w4a16"),
    ("olmo2", "ct-fp8"),
    ("gemma3", "torchao-int8"),
    ("starcoder2", "ct-w8a16"),
]


@pytest.mark.parametrize(("architecture", "name"), MIXTURES, ids=lambda case: case)
def test_other_architectures_and_experts(tmp_path: Path, architecture: str, name: str) -> None:
    """Experts of a mixture, joined projections, layers with biases, latents (whose expansion is dequantized)."""
    sizes = {"hidden_size": 64} if architecture != "qwen3_moe" else {"moe_intermediate_size": 64}
    check_exact(checkpoint(tmp_path, name, architecture, **sizes))


def test_some_modules_may_be_plain_and_others_quantized_otherwise(tmp_path: Path) -> None:
    """Queries stay plain, so that they do not join keys and values; the output head is quantized too."""
    made = checkpoint(tmp_path, "ct-w4a16", skip="q_proj")
    path = made.folder / "config.json"
    values = json.loads(path.read_text())
    values["quantization_config"]["ignore"].append("re:.*q_proj")
    path.write_text(json.dumps(values))
    check_exact(made)


@pytest.mark.usefixtures("warm_followers")
@pytest.mark.parametrize(
    ("architecture", "name", "tp", "pp"),
    [
        ("llama", "ct-w4a16", 2, 1),
        ("llama", "ct-w8a16", 2, 2),
        ("llama", "fp8-block", 1, 2),
        ("llama", "bnb-nf4-nested", 2, 1),
        ("mixtral", "ct-w4a16", 2, 1),
        ("phi3", "awq", 2, 1),
        ("gpt_oss", "mxfp4", 2, 1),
    ],
)
def test_tokens_of_several_ranks_are_those_of_generate(
    tmp_path: Path, architecture: str, name: str, tp: int, pp: int
) -> None:
    made = checkpoint(tmp_path, name, architecture, **WIDE)
    prompts = mixed_prompts(3, 512, count=6, longest=90)
    with LLM(config(made.folder, tp=tp, pp=pp, quantized_activations="none")) as llm:
        assert llm.core.executor.description.startswith("fused decoder")
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))
    assert [output.token_ids for output in outputs] == hf_greedy(made.plain, prompts, NEW_TOKENS)


@pytest.mark.usefixtures("warm_followers")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("ct-w4a16", {}), ("gptq-v1-ordered", WIDE)],
    ids=["a group of 32 of 96 columns", "columns in an order of their own"],
)
def test_a_group_that_ranks_would_cut_is_refused_naming_tp(tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    made = checkpoint(tmp_path, name, **sizes)
    with pytest.raises(ConfigError, match="cannot be divided over tp") as caught:
        load_executor(config(made.folder, tp=2))
    assert caught.value.field == "tp"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "nf4"])
def test_a_plain_checkpoint_is_quantized_at_load(tmp_path: Path, name: str) -> None:
    """Its KV is not that of the plain model; the error is that of the format, and the output head stays as it is."""
    path = make_checkpoint(tmp_path, "llama", initializer_range=0.1)
    plain = load_executor(config(path))
    quantized = load_executor(config(path, quantization=name))
    assert quantized.fingerprint.model_digest != plain.fingerprint.model_digest
    assert quantized.fingerprint.content_key() != plain.fingerprint.content_key()
    got, how = engine_logits(config(path, quantization=name), TOKENS)
    assert how.startswith("fused decoder")
    want = plain_logits(path, TOKENS)
    error = ((got - want).norm() / want.norm()).item()
    bounds = {"int8": (1e-3, 0.03), "int4": (0.02, 0.4), "fp8": (5e-3, 0.15), "nf4": (0.02, 0.4)}
    assert bounds[name][0] < error < bounds[name][1]


def test_experts_are_quantized_at_load_and_the_router_is_not(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe", initializer_range=0.1)
    want = plain_logits(path, TOKENS)
    got, _ = engine_logits(config(path, quantization="int8"), TOKENS)
    without, _ = engine_logits(config(path, quantization="int8", quantization_ignore=("lm_head", "experts")), TOKENS)
    assert all(1e-3 < (logits - want).norm() / want.norm() < 0.1 for logits in (got, without))
    assert (got - without).norm() > 5e-3 * want.norm()


def test_other_activations_are_another_identity(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, "ct-w8a16")
    digests = {
        load_executor(config(made.folder, quantized_activations=choice)).fingerprint.model_digest
        for choice in ("auto", "int8")
    }
    assert len(digests) == 2


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, "ct-w8a16")
    with pytest.raises(ConfigError, match=r"quantized already .*compressed-tensors") as caught:
        load_executor(config(made.folder, quantization="int8"))
    assert caught.value.field == "quantization"


def test_a_weight_of_another_shape_is_refused_by_file_and_tensor(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for part in ("weight", "weight_scale"):
            name = f"model.layers.1.mlp.down_proj.{part}"
            tensors[name] = tensors[name][:-2]

    made = checkpoint(tmp_path, "ct-w8a16", change=change)
    with pytest.raises(
        ConfigError, match=r"model\.safetensors: .*1\.mlp\.down_proj\.weight: is of a weight \[62, 96\]"
    ):
        load_executor(config(made.folder))


def test_weights_are_read_again_where_a_faster_path_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators of the fused decoder were made of them, and they were dropped."""
    made = checkpoint(tmp_path, "ct-w4a16")
    forward = FusedDecoder.forward

    def garbled(*args: Any) -> Any:
        logits, hidden = forward(*args)
        return logits.roll(1, dims=1), hidden

    monkeypatch.setattr(FusedDecoder, "forward", garbled)
    assert check_exact(made).startswith("transformers' modules")


def test_experts_of_which_one_is_missing_are_refused(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts.2.w3." in name]:
            del tensors[name]

    made = checkpoint(tmp_path, "ct-w8a16", "mixtral", change=change)
    with pytest.raises(ConfigError) as caught:
        load_executor(config(made.folder))
    assert "\n" not in str(caught.value)
