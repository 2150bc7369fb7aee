"""KV geometries of models: a table of well-known models, and those of model directories.

A multi-head latent attention (MLA) layer is taken as its latent and the rotary part of its key, which all heads share:
what instances keep. An engine that caches the expanded heads moves more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.errors import ConfigError, shown
from baton.kv_cache.layout import LayerShape
from baton.kv_cache.shards import KVGeometry

MAX_CONFIG_BYTES = 4 << 20
MAX_LAYERS = 1024

_HEADS: Mapping[str, tuple[int, int, int]] = {
    # layers, KV heads, head dim; each from the config.json of the repository named behind it on the Hugging Face hub
    "baton-tiny": (6, 2, 32),  # models/baton-tiny of this repository
    "llama-1b": (16, 8, 64),  # meta-llama/Llama-3.2-1B
    "llama-8b": (32, 8, 128),  # meta-llama/Llama-3.1-8B
    "llama-70b": (80, 8, 128),  # meta-llama/Llama-3.1-70B
    "llama-405b": (126, 8, 128),  # meta-llama/Llama-3.1-405B
    "qwen2.5-7b": (28, 4, 128),  # Qwen/Qwen2.5-7B
    "qwen3-8b": (36, 8, 128),  # Qwen/Qwen3-8B
    "qwen3-32b": (64, 8, 128),  # Qwen/Qwen3-32B
    "qwen3-30b-a3b": (48, 4, 128),  # Qwen/Qwen3-30B-A3B
    "mistral-7b": (32, 8, 128),  # mistralai/Mistral-7B-v0.3
    "mixtral-8x7b": (32, 8, 128),  # mistralai/Mixtral-8x7B-v0.1
    "mixtral-8x22b": (56, 8, 128),  # mistralai/Mixtral-8x22B-v0.1
    "gemma3-27b": (62, 16, 128),  # google/gemma-3-27b-it, text_config
    "gpt-oss-20b": (24, 8, 64),  # openai/gpt-oss-20b
    "gpt-oss-120b": (36, 8, 64),  # openai/gpt-oss-120b
}
_LATENTS: Mapping[str, tuple[int, int, int]] = {
    # layers, kv_lora_rank, qk_rope_head_dim
    "deepseek-v3": (61, 512, 64),  # deepseek-ai/DeepSeek-V3
    "kimi-k2": (61, 512, 64),  # moonshotai/Kimi-K2-Instruct
}
GEOMETRIES = tuple(sorted([*_HEADS, *_LATENTS]))
"""Names that :func:`named_geometry` knows."""


def named_geometry(name: str, dtype: str) -> KVGeometry:
    """Return a model's geometry.

    Raises:
        ConfigError: The name is not in the table.
    """
    if name in _HEADS:
        return _with_heads(*_HEADS[name], dtype)
    if name in _LATENTS:
        return _with_latent(*_LATENTS[name], dtype)
    raise ConfigError(f"geometry must be one of {', '.join(GEOMETRIES)}; got {shown(name)}", field="geometry")


def model_geometry(model: str, dtype: str) -> KVGeometry:
    """Read the geometry from a model directory's ``config.json``.

    Raises:
        ConfigError: No such file, or it does not say what a KV cache needs.
    """
    path = Path(model) / "config.json"
    try:
        with path.open(encoding="utf-8") as file:
            fields = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {shown(str(error))}; give a model directory", field="model") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} is not a JSON object", field="model")
    return config_geometry(fields, dtype)


def config_geometry(fields: Mapping[str, Any], dtype: str) -> KVGeometry:
    """Read the geometry from a transformers configuration.

    Raises:
        ConfigError: A field is missing or out of bounds, or some layers keep something else than K and V.
    """
    text = fields.get("text_config", fields)
    if not isinstance(text, dict):
        raise ConfigError("text_config is not an object", field="model")
    kinds = text.get("layer_types") or []
    if other := sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention", "chunked_attention"}):
        raise ConfigError(f"layers of type {', '.join(other)[:80]} keep something else than K and V", field="model")
    layers = _positive(text, "num_hidden_layers", MAX_LAYERS)
    if text.get("kv_lora_rank") is not None:
        return _with_latent(layers, _positive(text, "kv_lora_rank"), _positive(text, "qk_rope_head_dim"), dtype)
    heads = _positive(text, "num_attention_heads")
    kv_heads = _positive(text, "num_key_value_heads") if text.get("num_key_value_heads") is not None else heads
    dim = _positive(text, "head_dim") if text.get("head_dim") is not None else _positive(text, "hidden_size") // heads
    return _with_heads(layers, kv_heads, dim, dtype)


def _with_heads(layers: int, kv_heads: int, dim: int, dtype: str) -> KVGeometry:
    return KVGeometry((LayerShape(kv_heads, dim, dim),) * layers, dtype)


def _with_latent(layers: int, rank: int, rope: int, dtype: str) -> KVGeometry:
    return KVGeometry((LayerShape(1, rank + rope, 0),) * layers, dtype, frozenset(range(layers)))


def _positive(fields: Mapping[str, Any], name: str, most: int = 1 << 20) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 < value <= most:
        raise ConfigError(f"the model's config has no usable {name}: {shown(value)}", field="model")
    return value
