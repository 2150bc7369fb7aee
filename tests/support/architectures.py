"""Tiny random checkpoints of every causal language model that the installed transformers knows, made from its configs.

A config's fields are shrunk by name; what a family needs beyond that stands in :data:`OVERRIDES`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from baton.engine.models.loader import quiet_transformers

VOCAB = 512
MAX_LEN = 512
ORIGINAL_LEN = 96

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "embed_dim": 64,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "n_inner": 96,
    "dim_ff": 96,
    "dff": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "decoder_layers": 4,
    "encoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "dim_head": 16,
    "rotary_dim": 8,
    "sliding_window": 24,
    "max_position_embeddings": MAX_LEN,
    "n_positions": MAX_LEN,
    "n_ctx": MAX_LEN,
    "max_seq_len": MAX_LEN,
    "seq_length": MAX_LEN,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "index_topk": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "expert_ffn_hidden_size": 32,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
    "emb_dim": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "tie_word_embeddings": False,
    "initializer_range": 0.35,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}

MLA_SIZES: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
"""Of latent attention: as many KV heads as query heads, and ``head_dim`` is what is rotated."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}, "ffn_config": {"ffn_hidden_size": 32}},
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {
        "intermediate_size": [96] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 24},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "state_size": 16, "n_groups": 2},
    "qwen4_exp_text": {"hc_lowrank": 8, "ngram_vocab_size_base": 64, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 32, "indexer_compress_ratio": 4},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 32], "attention_head_size": 16, "attn_layers": ["local", "lsh"]},
    "zaya": {"num_experts_per_tok": 1},
    "qwen2_moe": {"use_sliding_window": False, "sliding_window": None},
}


def model_types() -> list[str]:
    """Return the types of all causal language models that transformers knows."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def make_config(model_type: str, **changes: Any) -> Any:
    """Return a small config of a model type."""
    cls = CONFIG_MAPPING[model_type]
    return cls(**small_fields(cls, {**OVERRIDES.get(model_type, {}), **changes}))


def small_fields(cls: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return fields for a config class, its nested configs among them."""
    try:
        default = cls()
    except Exception:
        default = None
    known = default.to_dict() if default is not None else {}
    fields = {name: value for name, value in SMALL.items() if name in known}
    if "kv_lora_rank" in fields:
        fields.update({name: value for name, value in MLA_SIZES.items() if name in known})
    kinds = list(dict.fromkeys(known.get("layer_types") or ()))
    if len(kinds) > 1 and "layer_types" not in overrides:
        fields["layer_types"] = [kinds[i % len(kinds)] for i in range(4)]
    for name, value in known.items():
        if isinstance(value, dict) and name.endswith("config"):
            sub = getattr(default, name)
            if hasattr(sub, "to_dict"):
                fields[name] = small_fields(type(sub), overrides.get(name, {}))
    fields.update({k: v for k, v in overrides.items() if not isinstance(v, dict) or not k.endswith("config")})
    return fields


def make_model(model_type: str, *, seed: int = 0, **changes: Any) -> Any:
    """Return a random float32 model."""
    config = make_config(model_type, **changes)
    with torch.random.fork_rng(), quiet_transformers():
        torch.manual_seed(seed)
        model = cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32)
        randomize(model)
    return model.eval()


def randomize(model: torch.nn.Module) -> None:
    """Give every parameter values that matter: norms that are not 1, biases and sinks that are not 0."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            with torch.no_grad():
                noise = torch.randn_like(parameter)
                if parameter.ndim >= 2:
                    parameter.copy_(noise * 0.35 * min(1.0, 64 / parameter.shape[-1]) ** 0.5)
                else:
                    parameter.add_(noise * 0.2)


def save(model: Any, folder: Path) -> Path:
    """Write a checkpoint without a tokenizer."""
    model.generation_config = cast(Any, GenerationConfig)(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    with quiet_transformers():
        model.save_pretrained(folder)
    return folder
