"""Configurations out of GGUF files: those that the models came with, or a refusal that names the key."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.gguf_files import rewrite_gguf, write_gguf
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from baton.errors import ConfigError
from baton.gguf.architecture import llama3_divisors, model_config, tensor_rules
from baton.gguf.container import read_gguf

SERVED = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    *("sliding_window", "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    *("hidden_act", "hidden_activation", "attention_bias", "mlp_bias", "rope_parameters"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """The checkpoint and the GGUF file of each architecture."""
    root, found = tmp_path_factory.mktemp("gguf"), {}
    for name in SERVED:
        folder = make_checkpoint(root / name, name)
        write_gguf(folder, root / f"{name}.gguf")
        found[name] = folder, root / f"{name}.gguf"
    return found


@pytest.mark.parametrize("name", SERVED)
def test_the_configuration_is_that_of_the_checkpoint(files: dict[str, tuple[Path, Path]], name: str) -> None:
    folder, path = files[name]
    expected = AutoConfig.from_pretrained(folder)
    raw = model_config(read_gguf(path))
    found = AutoConfig.for_model(**json.loads(json.dumps(raw)))
    for field in FIELDS:
        if name == "qwen2" and field in {"sliding_window", "layer_types"}:
            continue  # of windows that it does not use
        assert getattr(found, field, None) == getattr(expected, field, None), field
    assert raw["dtype"] == "float32"


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "architecture": (
        {"general.architecture": "phi3"},
        {},
        "general.architecture 'phi3' is not supported in a GGUF file",
    ),
    "mixture": ({"llama.expert_count": 8}, {}, "llama.expert_count: mixtures of experts are not supported"),
    "split": ({"split.count": 3}, {}, "split.count: one of several files"),
    "splits": ({"split.count": [1.0, 1.0]}, {}, "split.count: one of several files"),
    "sizes": ({"llama.embedding_length": [1e9] * 12}, {}, r"embedding_length: is '\[1000000000.0, .*\.\.\.', not a"),
    "ropes": ({"llama.rope.scaling.type": [1.0, 1.0]}, {}, r"scaling.type: \[1.0, 1.0\] is no name"),
    "no layers": ({"llama.block_count": 0}, {}, "llama.block_count: is 0, not a whole number from 1"),
    "layers": ({"llama.block_count": 10**6}, {}, "llama.block_count: is 1000000, not a whole number from 1"),
    "no size": ({"llama.embedding_length": None}, {}, "llama.embedding_length: is None"),
    "text": ({"llama.embedding_length": "64"}, {}, "llama.embedding_length: is '64'"),
    "other size": (
        {"llama.embedding_length": 128},
        {},
        r"token_embd.weight: is \[512, 64\], by the metadata \[512, 12",
    ),
    "heads": ({"llama.attention.head_count_kv": 3}, {}, "head_count_kv: 3 KV heads do not divide 4 heads"),
    "more heads": ({"llama.attention.head_count": 8}, {}, r"blk.0.attn_q.weight: is \[64, 64\], by the metadata"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": None}, {}, "layer_norm_rms_epsilon: is None"),
    "theta": ({"llama.rope.freq_base": float("inf")}, {}, "llama.rope.freq_base: is inf, not a number from"),
    "rope": ({"llama.rope.scaling.type": "longrope"}, {}, "llama.rope.scaling.type: 'longrope' is not supported"),
    "partial": ({"llama.rope.dimension_count": 8}, {}, "rope.dimension_count: is not the 16 of a head"),
    "frequencies": (
        {},
        {"rope_freqs.weight": np.full(8, 3, "f4")},
        "rope_freqs.weight: are divisors of another",
    ),
    "few frequencies": ({}, {"rope_freqs.weight": np.ones(4, "f4")}, r"rope_freqs.weight: is F32 \[4\], not F32 \[8\]"),
    "embedding": ({}, {"token_embd.weight": None}, "token_embd.weight: there is no such matrix"),
    "projection": ({}, {"blk.0.attn_k.weight": None}, "blk.0.attn_k.weight: there is no such tensor"),
    "odd tensor": (
        {},
        {"blk.0.attn_qkv.weight": np.ones(4, "f4")},
        "tensor 'blk.0.attn_qkv.weight' is none of a",
    ),
    "odd layer": (
        {},
        {"blk.4.attn_norm.weight": np.ones(64, "f4")},
        "tensor 'blk.4.attn_norm.weight' is none",
    ),
    "biases": (
        {},
        {"blk.0.attn_q.bias": np.ones(64, "f4")},
        "a llama has biases of all projections",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(files: dict[str, tuple[Path, Path]], tmp_path: Path, case: str) -> None:
    changes, tensors, why = REFUSED[case]
    path = rewrite_gguf(files["llama"][1], tmp_path / "m.gguf", changes, tensors)
    with pytest.raises(ConfigError, match=why) as refused:
        tensor_rules(read_gguf(path))
    assert refused.value.message.startswith(f"{path}: ")
    assert "\n" not in refused.value.message


def test_rope_scaling_of_llama_3_is_found_in_its_frequencies(
    files: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = 500000.0
    config = AutoConfig.for_model(
        "llama", hidden_size=64, num_attention_heads=4, rope_parameters={**rope, "rope_theta": theta}
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = theta ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(llama3_divisors(theta, 16, 32.0), plain / scaled.numpy(), rtol=1e-5)
    divisors = {"rope_freqs.weight": (plain / scaled.numpy()).astype("f4")}
    path = rewrite_gguf(files["llama"][1], tmp_path / "m.gguf", {"llama.rope.freq_base": theta}, divisors)
    found = model_config(read_gguf(path))["rope_parameters"]
    assert found.pop("factor") == pytest.approx(rope.pop("factor"), rel=1e-4)
    assert found == {**rope, "rope_theta": theta}
    assert "rope_freqs.weight" not in tensor_rules(read_gguf(path))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_other_rope_scaling(files: dict[str, tuple[Path, Path]], tmp_path: Path, kind: str) -> None:
    changes = {
        "llama.rope.scaling.type": kind,
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 256,
    }
    found = model_config(read_gguf(rewrite_gguf(files["llama"][1], tmp_path / "m.gguf", changes)))["rope_parameters"]
    assert (found["rope_type"], found["factor"]) == (kind, 4.0)
    assert found.get("original_max_position_embeddings") == (256 if kind == "yarn" else None)


def test_sizes_per_layer_that_are_one(files: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    path = rewrite_gguf(files["llama"][1], tmp_path / "m.gguf", {"llama.attention.head_count": [4, 4, 4, 4]})
    assert model_config(read_gguf(path))["num_attention_heads"] == 4
    path = rewrite_gguf(files["llama"][1], tmp_path / "n.gguf", {"llama.attention.head_count": [4, 4, 4, 2]})
    with pytest.raises(ConfigError, match=r"attention\.head_count: differs from layer to layer"):
        model_config(read_gguf(path))


def test_layers_with_windows(files: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    key = "gemma3.attention.sliding_window_pattern"
    sliding, full = "sliding_attention", "full_attention"
    each = [False, True, True, True]
    for value, expected in ((None, [sliding] * 4), (2, [sliding, full] * 2), (each, [full, *[sliding] * 3])):
        path = rewrite_gguf(files["gemma3"][1], tmp_path / "m.gguf", {key: value})
        assert model_config(read_gguf(path))["layer_types"] == expected
    with pytest.raises(ConfigError, match=f"{key}: is .*, not one for each layer"):
        model_config(read_gguf(rewrite_gguf(files["gemma3"][1], tmp_path / "m.gguf", {key: [True]})))


def test_values_stand_in_the_file_as_float32(files: dict[str, tuple[Path, Path]]) -> None:
    """1e-5 in float32 is 9.99999975e-06: what the model had is what is shortest."""
    path = files["llama"][1]
    assert struct.pack("<f", 1e-6) in path.read_bytes()
    assert model_config(read_gguf(path))["rms_norm_eps"] == 1e-6
