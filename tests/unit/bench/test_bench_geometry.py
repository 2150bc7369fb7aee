"""Geometries: the table against transformers' own configurations, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from baton.errors import ConfigError
from baton.kv_cache.layout import LayerShape
from baton_bench.geometries import GEOMETRIES, config_geometry, model_geometry, named_geometry
from baton_bench.kv.plan import Shape

MODELS = Path(__file__).resolve().parents[3] / "models"

CONFIGS: list[tuple[str, PretrainedConfig]] = [
    ("llama-8b", LlamaConfig(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8)),
    ("llama-70b", LlamaConfig(num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8)),
    (
        "llama-405b",
        LlamaConfig(num_hidden_layers=126, hidden_size=16384, num_attention_heads=128, num_key_value_heads=8),
    ),
    ("qwen3-8b", Qwen3Config(num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128)),
    ("qwen3-32b", Qwen3Config(num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8, head_dim=128)),
    ("mistral-7b", MistralConfig()),
    ("mixtral-8x7b", MixtralConfig()),
    (
        "gemma3-27b",
        Gemma3TextConfig(num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=16, head_dim=128),
    ),
    ("gpt-oss-120b", GptOssConfig()),
    ("deepseek-v3", DeepseekV3Config()),
]


def written(config: PretrainedConfig, folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(("name", "config"), CONFIGS, ids=[name for name, _ in CONFIGS])
def test_the_table_says_what_transformers_says(name, config, tmp_path):
    """The configurations are transformers' classes with the published sizes; where they are its defaults, those."""
    assert model_geometry(written(config, tmp_path), "bfloat16") == named_geometry(name, "bfloat16")


def test_our_own_model():
    assert model_geometry(str(MODELS / "baton-tiny"), "bfloat16") == named_geometry("baton-tiny", "bfloat16")


@pytest.mark.parametrize(
    ("name", "kappa"),
    [
        ("llama-8b", 128 << 10),
        ("llama-70b", 320 << 10),
        ("deepseek-v3", 61 * (512 + 64) * 2),
        ("gpt-oss-120b", 72 << 10),
    ],
)
def test_bytes_per_token(name, kappa):
    shape = Shape.of(named_geometry(name, "bfloat16"), 16)
    assert shape.bytes_per_token == kappa
    assert shape.layouts()[0].bytes_per_token == kappa
    assert Shape.of(named_geometry(name, "float32"), 16).bytes_per_token == 2 * kappa


def test_latents_are_not_split_over_tensor_parallelism():
    whole, split = (Shape.of(named_geometry("deepseek-v3", "bfloat16"), 16, tp) for tp in (1, 4))
    assert [layout.block_bytes for layout in split.layouts()] == [whole.layouts()[0].block_bytes] * 4
    heads = Shape.of(named_geometry("llama-8b", "bfloat16"), 16, 4)
    assert sum(layout.block_bytes for layout in heads.layouts()) == 16 * heads.bytes_per_token


def test_every_name_has_a_geometry():
    assert len(GEOMETRIES) >= 11
    for name in GEOMETRIES:
        assert named_geometry(name, "bfloat16").layers


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"head_dim": -1}, "head_dim"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"text_config": 3}, "text_config"),
    ],
)
def test_configs_that_say_too_little_are_refused(change, why):
    fields: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert config_geometry(fields, "float16").layers == (LayerShape(4, 16, 16),) * 2
    with pytest.raises(ConfigError, match=why):
        config_geometry(fields | change, "float16")


def test_a_nested_text_config_is_what_counts():
    text = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    geometry = config_geometry({"text_config": text, "num_hidden_layers": 99}, "bfloat16")
    assert geometry.layers == (LayerShape(2, 16, 16),) * 3


def test_no_directory_no_geometry(tmp_path):
    with pytest.raises(ConfigError, match="model directory"):
        model_geometry(str(tmp_path / "none"), "bfloat16")
    (tmp_path / "config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match="object"):
        model_geometry(str(tmp_path), "bfloat16")
    (tmp_path / "config.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_geometry(str(tmp_path), "bfloat16")
    with pytest.raises(ConfigError, match="llama-8b"):
        named_geometry("llama-9b", "bfloat16")
