"""The engine of a GPU, its operators in Triton's interpreter: the same tokens as ``generate`` on every path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.equality import hf_greedy, mixed_prompts
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.engine_logits import engine_logits, plain_logits
from tests.support.models.quantized_checkpoints import (
    PROJECTIONS,
    QuantizedCheckpoint,
    quantize_checkpoint,
    read_tensors,
)
from tests.support.models.stored_kv import add_tensors, kv_scales

from baton.config import EngineConfig
from baton.engine.executor import self_check
from baton.engine.llm import LLM
from baton.engine.models.layer_operators import GpuOperators
from baton.engine.quantization.modules import reloadable_weights
from baton.errors import ConfigError
from baton.types import SamplingParams
from baton_kernels.gpu.quantized_linear import TritonEightBitLinear, TritonQuantizedLinear
from baton_kernels.quantization import EXACT, INT8_PER_TOKEN, Int8Weight

VOCAB, NEW_TOKENS = 512, 4
TOKENS = np.random.default_rng(5).integers(8, VOCAB, 14).tolist()


def interpreted(path: object, **changes: object) -> EngineConfig:
    values = {
        "device": "interpret",
        "dtype": "float32",
        "kv_blocks": 24,
        "max_model_len": 48,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        **changes,
    }
    return EngineConfig(model=str(path), **values)


@pytest.fixture
def short_self_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens at load: each takes the interpreter long, and what the self-check sees is tested elsewhere."""
    for name, value in {"LENGTHS": (5, 3), "SPLITS": (3, 2), "FAR_TOKENS": 3, "FAR_ROWS": 1}.items():
        monkeypatch.setattr(self_check, name, value)


ONE_LAYER = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
"""A program of the interpreter's takes milliseconds, and there is one for each head of each token."""
GEMMA = {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("architecture", "changes", "path", "graphs"),
    [
        ("llama", {"num_hidden_layers": 2}, "fused decoder", ("2", "4")),
        ("gemma3", {"num_hidden_layers": 2, **GEMMA}, "transformers' modules", ("on",)),
        ("mixtral", {"num_hidden_layers": 1}, "fused decoder", ("off",)),
    ],
)
def test_every_path_gives_the_tokens_of_generate(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    architecture: str,
    changes: dict[str, Any],
    path: str,
    graphs: tuple[str, ...],
) -> None:
    if architecture != "llama":
        request.getfixturevalue("short_self_checks")
    folder = make_checkpoint(tmp_path, architecture, **changes)
    prompts = mixed_prompts(4, VOCAB, count=3, longest=18)
    expected = hf_greedy(folder, prompts, NEW_TOKENS)
    config = interpreted(folder, packed_linears=path == "fused decoder", cuda_graphs=graphs)
    with LLM(config) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))
        assert [each.token_ids for each in outputs] == expected
        description = llm.core.executor.description
        assert description.startswith(f"{path}, attention triton, linears torch, device interpret")
        said = {("2", "4"): "graphs of 2 to 4 sequences (2 sizes)", ("on",): "graphs of 1 to 4 sequences (3 sizes)"}
        assert description.endswith(said.get(graphs, "device interpret"))
        llm.core.check_integrity()


def quantized(folder: Path, name: str, architecture: str, **sizes: Any) -> QuantizedCheckpoint:
    plain = make_checkpoint(folder / "source", architecture, **{"initializer_range": 0.1, **sizes})
    return quantize_checkpoint(plain, folder, name)


@pytest.mark.usefixtures("short_self_checks")
@pytest.mark.parametrize(
    ("name", "form", "kv_dtype", "graphs"),
    [
        ("ct-w8a16", "7 x int8 per row", "int8", "2"),
        ("gptq-v1-ordered", "7 x int4 per 32", "fp8_e4m3", "off"),
    ],
)
def test_packed_weights_and_kv_of_8_bits_give_the_tokens_of_the_cpu(
    tmp_path: Path, name: str, form: str, kv_dtype: str, graphs: str
) -> None:
    """Whose weights and KV are compared with ``generate`` in ``quantization/``; nothing plain is in memory."""
    made = quantized(tmp_path, name, "llama", **ONE_LAYER)
    add_tensors(made.folder, kv_scales(1, 0.06, 0.03))
    prompts = mixed_prompts(4, VOCAB, count=2, longest=8)
    options = {"kv_dtype": kv_dtype, "quantized_activations": "none", "max_model_len": 12, "cuda_graphs": (graphs,)}
    tokens = []
    for device in ("cpu", "interpret"):
        with LLM(interpreted(made.folder, **options, device=device)) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))
            tokens.append(([each.token_ids for each in outputs], llm.core.arena.block_bytes))
            llm.core.check_integrity()
            executor: Any = llm.core.executor
            assert f", KV {kv_dtype}" in executor.description
    assert tokens[0] == tokens[1]
    assert executor.description.startswith("fused decoder, attention triton")
    assert f"quantized weights {form} by triton, inputs exact" in executor.description
    assert ("graphs of 2" in executor.description) is (graphs == "2")
    assert not any(held.nbytes for held in reloadable_weights(executor.model.module))
    layer = executor._runner._decoder._layers[0]
    # Columns of act order differ between projections, which stay side by side then.
    joined = [layer.attention.qkv, layer.mlp.gate_up]
    operators = [part for each in joined for part in getattr(each, "_parts", [each])]
    operators += [layer.output, layer.mlp.down]
    plain = sum(tensor.nbytes for key, tensor in read_tensors(made.plain).items() if PROJECTIONS.search(key))
    assert sum(each.nbytes for each in operators) < 0.3 * plain


@pytest.mark.usefixtures("short_self_checks")
@pytest.mark.parametrize(
    ("architecture", "name", "layers", "path"),
    [
        ("gpt_oss", "mxfp4", 1, "fused decoder"),
        ("deepseek_v2", "ct-w8a16", 2, "transformers' modules"),
    ],
)
def test_logits_of_packed_weights_are_those_of_the_dequantized_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str, name: str, layers: int, path: str
) -> None:
    made = quantized(tmp_path, name, architecture, num_hidden_layers=layers)
    config = interpreted(made.folder, quantized_activations="none", cuda_graphs=("off",), max_model_len=16)
    got, how = engine_logits(config, TOKENS)
    torch.testing.assert_close(got, plain_logits(made.plain, TOKENS), atol=1e-3, rtol=1e-3)
    assert how.startswith(path)
    assert " by triton, inputs exact" in how
    assert "by their definition" not in caplog.text


@pytest.mark.usefixtures("short_self_checks")
@pytest.mark.parametrize(
    ("name", "architecture", "sizes", "inputs"),
    [
        ("fp8-block", "qwen3_moe", {"moe_intermediate_size": 64}, "fp8"),
        ("ct-w8a8", "llama", {}, "int8"),
    ],
)
def test_inputs_are_rounded_as_the_checkpoint_says(
    tmp_path: Path, name: str, architecture: str, sizes: dict[str, Any], inputs: str
) -> None:
    """By groups, in linear layers and in front of both products of experts; or by the token, multiplied in int8."""
    made = quantized(tmp_path, name, architecture, **ONE_LAYER, **sizes)
    exact = plain_logits(made.plain, TOKENS)
    rounded, _ = engine_logits(interpreted(made.folder, device="cpu", packed_linears=False), TOKENS)
    got, how = engine_logits(interpreted(made.folder, cuda_graphs=("off",), max_model_len=16), TOKENS)
    assert how.startswith("fused decoder")
    assert f" by triton, inputs {inputs}" in how
    first = slice(0, 1)  # a token that no other one's rounding reaches
    errors = (got - rounded).norm(dim=-1), (rounded - exact).norm(dim=-1)
    assert errors[0][first] < 0.1 * errors[1][first]
    assert errors[0].median() < errors[1].median()


def test_8_bits_are_multiplied_with_8_bits() -> None:
    weight = Int8Weight(torch.ones(16, 32, dtype=torch.int8), torch.ones(16, 1))
    for scheme, kind in ((INT8_PER_TOKEN, TritonEightBitLinear), (EXACT, TritonQuantizedLinear)):
        assert type(GpuOperators().quantized_linear(weight, None, scheme)) is kind


def test_bfloat16_is_refused_in_the_interpreter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bfloat16") as caught:
        LLM(interpreted(make_checkpoint(tmp_path, "llama", num_hidden_layers=1), dtype="bfloat16"))
    assert caught.value.field == "dtype"
