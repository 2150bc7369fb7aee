"""From a GGUF file's metadata to a transformers configuration, and from its tensors' names to those of modules.

Every size is compared with the tensors, so that nothing in a configuration is larger than the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from baton.errors import ConfigError
from baton.gguf.container import GgufFile, shown

ROPE_FREQUENCIES = "rope_freqs.weight"
"""Divisors of the rotary frequencies, which are the result of Llama 3.1's scaling."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Properties of a model type in GGUF files.

    Attributes:
        model_type: Name of the type in transformers.
        class_name: Name of the class in transformers.
        permuted: Whether rows of queries and keys that are rotated together are neighbours; transformers has them in
            two halves.
        gemma: Whether norms are stored with 1 added, and activation and names are Gemma's.
        sandwich: Whether there are norms before and behind both attention and MLP.
    """

    model_type: str
    class_name: str
    permuted: bool = False
    gemma: bool = False
    sandwich: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "gemma": Architecture("gemma", "GemmaForCausalLM", gemma=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", gemma=True, sandwich=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", gemma=True, sandwich=True),
}
"""Architectures by ``general.architecture``. Mistral's models are ``llama`` there."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLAIN_NORMS = {"ffn_norm": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,5})\.)?([a-z0-9_]+)\.(weight|bias)")
_LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Numbers of layers of the 27B models, whose queries are scaled by another size than that of a head."""
_LLAMA3_ORIGINAL = 8192
_LLAMA3_LOW = 1.0
_LLAMA3_HIGH = 4.0
"""Original context and frequency factors of Llama 3.1 and 3.2, which differ in the scaling factor alone."""


@dataclass(frozen=True, slots=True)
class TensorRule:
    """How one tensor of a file becomes a parameter.

    Attributes:
        name: Name of the parameter in transformers' modules.
        heads: Number of heads within which rows are permuted; 0: rows are not permuted.
        added: Number that the file's writer added to every value.
    """

    name: str
    heads: int = 0
    added: float = 0.0


def model_config(file: GgufFile) -> dict[str, Any]:
    """Return the content of the model's ``config.json``.

    Raises:
        ConfigError: The architecture is not supported, a value is missing or impossible, or sizes differ from those of
            the tensors; names the file and the key.
    """
    return _Config(file).build()


def tensor_rules(file: GgufFile) -> dict[str, TensorRule]:
    """Return the rules of a file's tensors that are parameters, by the tensors' names.

    Raises:
        ConfigError: The architecture has no such tensor, or as :func:`model_config`.
    """
    config = model_config(file)
    kind = architecture(file)
    layers = config["num_hidden_layers"]
    names = {**_LAYER, **(_SANDWICH_NORMS if kind.sandwich else _PLAIN_NORMS)}
    rules = {}
    for name in file.tensors:
        if name == ROPE_FREQUENCIES:
            continue
        match = _NAME.fullmatch(name)
        layer, part, what = match.groups() if match else (None, "", "")
        module = _TOP.get(part) if layer is None else names.get(part)
        if module is None or (layer is not None and int(layer) >= layers):
            raise ConfigError(f"{file.path}: tensor {shown(name)} is none of a {kind.model_type}", field="model")
        heads = 0
        if kind.permuted and part in {"attn_q", "attn_k"}:
            heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        added = 1.0 if kind.gemma and part.endswith("norm") else 0.0
        path = module if layer is None else f"model.layers.{layer}.{module}"
        rules[name] = TensorRule(f"{path}.{what}", heads, added)
    return rules


def architecture(file: GgufFile) -> Architecture:
    """Return a file's architecture.

    Raises:
        ConfigError: The architecture is not supported.
    """
    name = file.metadata.get("general.architecture")
    kind = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ConfigError(
            f"{file.path}: general.architecture {shown(name)} is not supported in a GGUF file "
            f"(supported: {', '.join(ARCHITECTURES)})",
            field="model",
        )
    return kind


class _Config:
    """Builds the configuration of one file."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._kind = architecture(file)
        self._prefix = str(file.metadata["general.architecture"])

    def build(self) -> dict[str, Any]:
        parts = self._file.metadata.get("split.count", 0)
        if not isinstance(parts, int) or parts not in {0, 1}:
            self._refuse("split.count", "one of several files; merge them first (llama-gguf-split --merge)")
        if self._has("expert_count") and self._integer("expert_count", 0, 1 << 16):
            self._refuse(self._key("expert_count"), "mixtures of experts are not supported in a GGUF file")
        layers = self._integer("block_count", 1, len(self._file.tensors))
        hidden = self._integer("embedding_length", 1, 1 << 24)
        heads = self._per_layer("attention.head_count", layers)
        kv_heads = self._per_layer("attention.head_count_kv", layers) if self._has("attention.head_count_kv") else heads
        inner = self._per_layer("feed_forward_length", layers)
        if heads % kv_heads:
            self._refuse(self._key("attention.head_count_kv"), f"{kv_heads} KV heads do not divide {heads} heads")
        default_dim = hidden // heads
        head_dim = self._integer("attention.key_length", 1, 1 << 16, default_dim)
        if self._integer("attention.value_length", 1, 1 << 16, head_dim) != head_dim:
            self._refuse(self._key("attention.value_length"), f"is not the {head_dim} of attention.key_length")
        if self._integer("rope.dimension_count", 1, 1 << 16, head_dim) != head_dim:
            self._refuse(self._key("rope.dimension_count"), f"is not the {head_dim} of a head")
        vocab = self._check_shapes(hidden, inner, heads * head_dim, kv_heads * head_dim)
        context = self._integer("context_length", 1, 1 << 31)
        config: dict[str, Any] = {
            "architectures": [self._kind.class_name],
            "model_type": self._kind.model_type,
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": context,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "dtype": self._dtype(),
            "rope_parameters": self._rope(head_dim),
        }
        if self._kind.model_type != "qwen2":
            config["head_dim"] = head_dim
        elif head_dim != default_dim:
            self._refuse(self._key("attention.key_length"), f"is {head_dim}, not the {default_dim} of a qwen2")
        if self._kind.gemma:
            self._add_gemma(config)
        elif self._kind.model_type == "llama":
            biased = [f"blk.0.{part}.bias" in self._file.tensors for part in ("attn_q", "attn_output")]
            if biased[0] != biased[1]:
                self._refuse("blk.0.attn_q.bias", "a llama has biases of all projections of attention or of none")
            config |= {"attention_bias": biased[0], "mlp_bias": "blk.0.ffn_up.bias" in self._file.tensors}
        elif self._kind.model_type == "qwen3":
            config["attention_bias"] = "blk.0.attn_q.bias" in self._file.tensors
        for name in ("bos", "eos", "padding"):
            token = self._file.metadata.get(f"tokenizer.ggml.{name}_token_id")
            if isinstance(token, int) and 0 <= token < vocab:
                config["pad_token_id" if name == "padding" else f"{name}_token_id"] = token
        return config

    def _add_gemma(self, config: dict[str, Any]) -> None:
        config["hidden_activation" if self._kind.sandwich else "hidden_act"] = "gelu_pytorch_tanh"
        if not self._kind.sandwich:
            return
        layers = config["num_hidden_layers"]
        head_dim = config["head_dim"]
        large = layers == _LARGE_GEMMA.get(self._prefix)
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"] if large else head_dim
        config["sliding_window"] = self._integer("attention.sliding_window", 1, 1 << 31)
        second = self._kind.model_type == "gemma2"
        config["layer_types"] = self._layer_types(layers, 2 if second else 6)
        for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
            config[key] = self._number(key, 0.0, 1e6, default if second else 0.0) or None
        if not second:
            local = self._number("rope.freq_base_swa", 1.0, 1e12, 10000.0)
            config["rope_parameters"] = {
                "full_attention": config["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            }

    def _layer_types(self, layers: int, period: int) -> list[str]:
        """Return the types of layers: all but the last of each period attend in a window, or as the file says."""
        pattern = self._file.metadata.get(self._key("attention.sliding_window_pattern"), period)
        if isinstance(pattern, np.ndarray) and pattern.dtype.kind in "iu" and len(pattern) == layers:
            windowed = [bool(each) for each in pattern.tolist()]
        elif isinstance(pattern, int) and 1 <= pattern <= 1 << 16:
            windowed = [bool((index + 1) % pattern) for index in range(layers)]
        else:
            self._refuse(self._key("attention.sliding_window_pattern"), f"is {shown(pattern)}, not one for each layer")
        return ["sliding_attention" if each else "full_attention" for each in windowed]

    def _rope(self, head_dim: int) -> dict[str, Any]:
        theta = self._number("rope.freq_base", 1.0, 1e12, 1e6 if self._prefix == "gemma3" else 10000.0)
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
        kind = self._file.metadata.get(self._key("rope.scaling.type"), "none")
        if not isinstance(kind, str):
            self._refuse(self._key("rope.scaling.type"), f"{shown(kind)} is no name")
        if kind in {"linear", "yarn"}:
            rope |= {"rope_type": kind, "factor": self._number("rope.scaling.factor", 1.0, 1e6)}
            if kind == "yarn":
                original = self._integer("rope.scaling.original_context_length", 1, 1 << 31)
                rope["original_max_position_embeddings"] = original
        elif kind != "none":
            self._refuse(self._key("rope.scaling.type"), f"{shown(kind)} is not supported")
        if ROPE_FREQUENCIES in self._file.tensors:
            if rope["rope_type"] != "default":
                self._refuse(ROPE_FREQUENCIES, f"stands beside rope scaling {shown(kind)}")
            rope |= self._llama3(theta, head_dim)
        return rope

    def _llama3(self, theta: float, head_dim: int) -> dict[str, Any]:
        """Return the parameters of Llama 3.1's scaling, of which a file holds the divisors instead."""
        info = self._file.tensors[ROPE_FREQUENCIES]
        if info.type.name != "F32" or info.shape != (head_dim // 2,):
            self._refuse(ROPE_FREQUENCIES, f"is {info.type.name} {list(info.shape)}, not F32 [{head_dim // 2}]")
        divisors = np.fromfile(self._file.path, "<f4", head_dim // 2, offset=info.offset)
        factor = float(divisors.max())
        if not np.isfinite(divisors).all() or not 1.0 < factor < 1e6:
            self._refuse(ROPE_FREQUENCIES, "holds no divisors of frequencies")
        expected = llama3_divisors(theta, head_dim, factor)
        if not np.allclose(divisors, expected, rtol=1e-3):
            self._refuse(ROPE_FREQUENCIES, "are divisors of another scaling than Llama 3.1's, which is not supported")
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_ORIGINAL,
        }

    def _check_shapes(self, hidden: int, inner: int, queries: int, keys: int) -> int:
        """Compare sizes with the first layer's tensors; return the size of the vocabulary."""
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            self._refuse("token_embd.weight", "there is no such matrix")
        vocab = embedding.shape[0]
        wanted = {
            "token_embd.weight": (vocab, hidden),
            "blk.0.attn_q.weight": (queries, hidden),
            "blk.0.attn_k.weight": (keys, hidden),
            "blk.0.attn_v.weight": (keys, hidden),
            "blk.0.attn_output.weight": (hidden, queries),
            "blk.0.ffn_up.weight": (inner, hidden),
        }
        for name, shape in wanted.items():
            info = self._file.tensors.get(name)
            if info is None:
                self._refuse(name, "there is no such tensor")
            if info.shape != shape:
                self._refuse(name, f"is {list(info.shape)}, by the metadata {list(shape)}")
        return vocab

    def _dtype(self) -> str:
        kind = self._file.tensors["blk.0.attn_q.weight"].type.name
        return {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")

    def _key(self, name: str) -> str:
        return f"{self._prefix}.{name}"

    def _has(self, name: str) -> bool:
        return self._key(name) in self._file.metadata

    def _integer(self, name: str, least: int, most: int, default: int | None = None) -> int:
        value = self._file.metadata.get(self._key(name), default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self._refuse(self._key(name), f"is {shown(value)}, not a whole number from {least} to {most}")
        return value

    def _per_layer(self, name: str, layers: int) -> int:
        """Return a size that is given once, or equally for each layer."""
        value = self._file.metadata.get(self._key(name))
        if isinstance(value, np.ndarray):
            if len(value) != layers or len(set(value.tolist())) != 1 or value.dtype.kind not in "iu":
                self._refuse(self._key(name), "differs from layer to layer, which is not supported")
            value = int(value[0])
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 24:
            self._refuse(self._key(name), f"is {shown(value)}, not a whole number from 1 to {1 << 24}")
        return value

    def _number(self, name: str, least: float, most: float, default: float | None = None) -> float:
        value = self._file.metadata.get(self._key(name), default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            self._refuse(self._key(name), f"is {shown(value)}, not a number from {least:g} to {most:g}")
        return float(value)

    def _refuse(self, what: str, why: str) -> NoReturn:
        raise ConfigError(f"{self._file.path}: {what}: {why}", field="model")


def llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the divisors of the rotary frequencies in Llama 3.1's scaling, float64 [head_dim // 2].

    Frequencies with wavelengths below a quarter of the original context stay, those with wavelengths above the context
    are divided by the factor, and those between are interpolated.
    """
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_ORIGINAL * frequencies / (2 * math.pi)
    smooth = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    divisors: np.ndarray[Any, np.dtype[np.float64]] = 1 / ((1 - smooth) / factor + smooth)
    return divisors
