"""Drafting heads with random weights, as files of the published forms, and what an EAGLE head computes, plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

HEADS, KV_HEADS, DIM = 4, 2, 16


def write_eagle(folder: Path, target: Path, *, third: bool, drafted: int | None = None, seed: int = 0) -> Path:
    """Write a head of random weights for a model; ``drafted``: tokens of an EAGLE-3 head's own vocabulary."""
    config = AutoConfig.from_pretrained(target).get_text_config()
    width, vocab = int(config.hidden_size), int(config.vocab_size)
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    at, inputs, inner = ("midlayer" if third else "layers.0"), (2 if third else 1) * width, 3 * width
    tensors = {
        "fc.weight": weight(width, (3 if third else 2) * width),
        f"{at}.self_attn.q_proj.weight": weight(HEADS * DIM, inputs),
        f"{at}.self_attn.k_proj.weight": weight(KV_HEADS * DIM, inputs),
        f"{at}.self_attn.v_proj.weight": weight(KV_HEADS * DIM, inputs),
        f"{at}.self_attn.o_proj.weight": weight(width, HEADS * DIM),
        f"{at}.mlp.gate_proj.weight": weight(inner, width),
        f"{at}.mlp.up_proj.weight": weight(inner, width),
        f"{at}.mlp.down_proj.weight": weight(width, inner),
        f"{at}.post_attention_layernorm.weight": 1 + 0.1 * weight(width),
    }
    settings: dict[str, Any] = {"hidden_size": width, "vocab_size": vocab, "num_attention_heads": HEADS}
    settings |= {"num_key_value_heads": KV_HEADS, "head_dim": DIM, "intermediate_size": inner, "rms_norm_eps": 1e-6}
    if third:
        size = drafted or vocab
        chosen = torch.randperm(vocab, generator=generator)[:size].sort().values
        tensors |= {
            f"{at}.input_layernorm.weight": 1 + 0.1 * weight(width),
            f"{at}.hidden_norm.weight": 1 + 0.1 * weight(width),
            "norm.weight": 1 + 0.1 * weight(width),
            "lm_head.weight": weight(size, width),
            "d2t": chosen - torch.arange(size),
        }
        settings["draft_vocab_size"] = size
    else:
        tensors["fc.bias"] = 0.1 * weight(width)
    return _write(folder, settings, tensors, "model.safetensors")


def write_medusa(folder: Path, target: Path, *, heads: int = 3, seed: int = 0) -> Path:
    """Write Medusa heads of random weights for a model."""
    config = AutoConfig.from_pretrained(target).get_text_config()
    width, vocab = int(config.hidden_size), int(config.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(heads):
        tensors[f"{head}.0.linear.weight"] = torch.randn(width, width, generator=generator) * width**-0.5
        tensors[f"{head}.0.linear.bias"] = torch.zeros(width)
        tensors[f"{head}.1.weight"] = torch.randn(vocab, width, generator=generator) * width**-0.5
    return _write(folder, {"medusa_num_heads": heads, "medusa_num_layers": 1}, tensors, "medusa_lm_head.safetensors")


def as_vllm(folder: Path, source: Path, drafted: torch.Tensor | None = None, *, shared: bool = False) -> Path:
    """Write Medusa heads in vLLM's form.

    Args:
        folder: Where to.
        source: Heads in Medusa's form, of one layer each.
        drafted: Tokens of a vocabulary of its own.
        shared: Whether the first head's output layer is everybody's.
    """
    settings = json.loads((source / "config.json").read_text())
    given, count = load_file(source / "medusa_lm_head.safetensors"), settings["medusa_num_heads"]
    width, vocab = given["0.1.weight"].shape[1], given["0.1.weight"].shape[0]
    found = {"num_heads": count, "num_hidden_layers": 1, "hidden_size": width, "vocab_size": vocab}
    found |= {"model_type": "medusa", "medusa_fc_bias": True, "original_lm_head": shared}
    tensors = {}
    for head in range(count):
        for part in ("weight", "bias"):
            tensors[f"blocks.{head}.layers.0.{part}"] = given[f"{head}.0.linear.{part}"]
        out = given[f"{head}.1.weight"]
        if head == 0 or not shared:
            tensors[f"lm_heads.{head}.weight"] = out if drafted is None else out[drafted]
    if drafted is not None:
        found["truncated_vocab_size"] = len(drafted)
        tensors["token_map"] = drafted
    return _write(folder, found, tensors, "model.safetensors")


def _write(folder: Path, settings: dict[str, Any], tensors: dict[str, torch.Tensor], name: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / name)
    return folder


def eagle_hidden(folder: Path, embedded: torch.Tensor, hidden: torch.Tensor, *, third: bool) -> torch.Tensor:
    """Return the hidden states [T, width] of an EAGLE head's slots: one sequence, its whole context at once.

    Args:
        folder: The head.
        embedded: Of the slots' tokens [T, width].
        hidden: What they take of the states of the tokens before them [T, width]; an EAGLE-3 head's ``fc`` is done.
        third: Whether it is an EAGLE-3 head.
    """
    tensors = load_file(folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    eps, at = settings["rms_norm_eps"], "midlayer" if third else "layers.0"

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * tensors[f"{at}.{name}.weight"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ tensors[f"{at}.{name}.weight"].T

    if third:
        residual, x = hidden, torch.cat([norm(embedded, "input_layernorm"), norm(hidden, "hidden_norm")], -1)
    else:
        residual = x = torch.cat([embedded, hidden], -1) @ tensors["fc.weight"].T + tensors["fc.bias"]
    length = len(x)
    q, k, v = (linear(x, f"self_attn.{part}_proj").view(length, -1, DIM).transpose(0, 1)[None] for part in "qkv")
    config = LlamaConfig(hidden_size=HEADS * DIM, num_attention_heads=HEADS, head_dim=DIM)
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(length)[None])
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    hidden = residual + linear(out[0].transpose(0, 1).reshape(length, -1), "self_attn.o_proj")
    x = norm(hidden, "post_attention_layernorm")
    return hidden + linear(F.silu(linear(x, "mlp.gate_proj")) * linear(x, "mlp.up_proj"), "mlp.down_proj")
