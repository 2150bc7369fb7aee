"""The random models of ``benchmarks/engine.py``: one of each family, about 125M parameters of which work on a token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from baton.engine.models.loader import quiet_transformers

FULL: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
}
SMOKE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
}
COMMON: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_1b": (
        "llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "sliding_window": 512,
            "query_pre_attn_scalar": 64,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256, "norm_topk_prob": True},
    ),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 512, "sliding_window": 128},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 12,
            "q_lora_rank": 384,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "head_dim": 32,
            "n_routed_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 256,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 6,
            "linear_num_value_heads": 12,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
}
"""Model type, and what differs from the sizes that all have; experts are as many of the whole as in the real models."""


@dataclass(frozen=True)
class BenchmarkModel:
    """A checkpoint that was written.

    Attributes:
        parameters: All of it; ``active``: those that take part in a token.
        vocab_size: Tokens of its vocabulary.
    """

    parameters: int
    active: int
    vocab_size: int


def write_model(folder: Path, name: str, *, smoke: bool) -> BenchmarkModel:
    """Write a random model in bfloat16."""
    model_type, changes = FAMILIES[name]
    changes = dict(changes)
    sizes = SMOKE if smoke else FULL
    if "layer_types" in changes:
        types = changes["layer_types"]
        changes["layer_types"] = [types[i % len(types)] for i in range(sizes["num_hidden_layers"])]
    if smoke and "q_lora_rank" in changes:
        changes["num_key_value_heads"] = sizes["num_attention_heads"]
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **sizes, **changes})
    torch.manual_seed(0)
    with quiet_transformers():
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for router in (p for n, p in model.named_parameters() if n.endswith((".router.weight", ".gate.weight"))):
                router *= 16  # as drawn, all experts are nearly tied, and rounding chooses them
        model.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    count, chosen = (changes.get(key, 1) for key in ("num_experts", "num_experts_per_tok"))
    count = changes.get("num_local_experts", changes.get("n_routed_experts", count))
    return BenchmarkModel(parameters, parameters - experts + experts * chosen // count, sizes["vocab_size"])
