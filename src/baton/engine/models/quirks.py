"""Facts about model families for the loader, the attention probe, the fused decoder and the division over ranks.

Everything else about an architecture is read off its modules, its config and transformers' plans at load.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from baton.errors import ConfigError
from baton_kernels.experts import Scoring

log = logging.getLogger(__name__)

# For the fused decoder


class LayerNorms(NamedTuple):
    """Names of a layer's norms; empty: the layer has no norm there."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""

    def names(self) -> set[str]:
        """Return the names of the norms that a layer has."""
        return set(filter(None, self))


PRE_NORMS = LayerNorms()
POST_NORMS = LayerNorms("", "post_attention_layernorm", "", "post_feedforward_layernorm")
SANDWICH_NORMS = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
GLM_SANDWICH_NORMS = LayerNorms(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)


@dataclass(frozen=True, slots=True)
class Family:
    """Structure of the layers of a model type; sizes, activations and biases are read off its modules.

    Attributes:
        norms: Norms of a layer.
        norm_offset: Added to the weights of all norms (1 where they are stored as differences from 1).
        router: Name of the router in the block of a mixture of experts.
        scoring: How the router's logits become scores; with ``SIGMOID`` they are computed in float32.
        normalizes: Whether the weights of the chosen experts are divided by their sum; ``None``: as the router's
            ``norm_topk_prob`` says.
        rotates_pairs: Whether the rotary embedding turns neighbours instead of the two halves against each other.
    """

    norms: LayerNorms = PRE_NORMS
    norm_offset: float = 0.0
    router: str = "gate"
    scoring: Scoring = Scoring.SOFTMAX
    normalizes: bool | None = None
    rotates_pairs: bool = False


FUSED_FAMILIES = {
    "cwm": Family(),
    "deepseek_v3": Family(scoring=Scoring.SIGMOID),
    "gemma2": Family(norms=SANDWICH_NORMS, norm_offset=1.0),
    "gemma3_text": Family(norms=SANDWICH_NORMS, norm_offset=1.0),
    "glm4": Family(norms=GLM_SANDWICH_NORMS, rotates_pairs=True),
    "gpt_oss": Family(router="router", scoring=Scoring.SOFTMAX_OF_CHOSEN, normalizes=False),
    "internlm3": Family(),
    "iquestcoder": Family(),
    "llama": Family(),
    "ministral": Family(),
    "mistral": Family(),
    "mixtral": Family(normalizes=True),
    "olmo2": Family(norms=POST_NORMS),
    "olmo3": Family(norms=POST_NORMS),
    "phi3": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "seed_oss": Family(),
}
"""Model types whose code was read and whose results were compared. No other type is fused, whatever its parts are
named: Ministral 3, for one, has Llama's parts and scales its queries by their positions.
"""
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"}
LATENT_ATTENTION_PARTS = {
    "q_proj",
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "o_proj",
}
MLP_PARTS = {"gate_proj", "up_proj", "gate_up_proj", "down_proj"}

COUNTS_ON_FROM_CACHE = frozenset({"llama4_text"})
"""Model types that scale queries by positions, which they derive from the length of their cache."""

# Types of layers, as transformers' configs name them (`layer_types`)

SERVED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "dense", "sparse"}
"""Types of attention and MLPs that Baton computes."""
RECURRENT_LAYERS = {"attention", "conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "mlp", "moe"}
"""Types of layers of models that also have recurrent layers or convolutions over tokens."""
DRAFT_MODELS = {"gemma4_assistant", "gemma4_unified_assistant"}
"""Model types that draft for another model, and attend over its KV."""
SPARSE_LAYERS = {
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "indexed_attention",
    "minimax_m3_sparse",
}
SPARSE_FIELDS = ("index_topk", "indexer_budget")
"""Fields of configs whose attention picks keys by an indexer with a cache of its own (such as DeepSeek-V3.2)."""

# Projections of an attention module by the part that a rank has; those with ``_a_`` and ``_b_`` are DeepSeek's MLA

QUERY_PROJECTIONS = {"q_proj", "q_b_proj"}
"""A rank has the rows of its query heads."""
KEY_VALUE_PROJECTIONS = {"k_proj", "v_proj", "kv_b_proj"}
"""A rank has the rows of its KV heads, or of its query heads where the KV is a latent."""
WHOLE_PROJECTIONS = {"q_a_proj", "kv_a_proj_with_mqa", "q_a_layernorm", "kv_a_layernorm"}
"""Every rank has all of them: latents that all heads share."""
LATENT_PROJECTION = "kv_b_proj"
"""Name, in MLA's modules, of the linear layer from latents to heads' keys and values."""
LATENT_EXPANSION = "expand_kv"
"""Name of the method of MLA's modules that applies that layer."""
JOINED_PROJECTION = "qkv_proj"
"""Queries, keys and values, one after the other (Phi-3); a rank has rows of each."""
HEAD_NORMS = {"q_norm", "k_norm"}
"""Norms within a head, or over all heads (OLMo 2), of which a rank has a part."""
JOINED_MLP = {"gate_up_proj", "down_proj"}
"""Gate and up in one layer, one after the other (Phi-3, GLM 4), and down; transformers' plans leave them whole."""
WHOLE_STYLES = {"colwise_gather_output", "rowwise_split_input", "replicated_with_grad_allreduce"}
"""Styles of transformers' plans whose result is the same if every rank computes all of it."""


def has_interleaved_experts(module: nn.Module) -> bool:
    """Whether a module has GPT-OSS's experts: [E, hidden, 2 * inner] with alternating gates and ups, and biases."""
    return hasattr(module, "gate_up_proj_bias") and hasattr(module, "down_proj_bias")


def has_experts(module: nn.Module) -> bool:
    """Whether any layer of a model has experts."""
    return any("experts" in name.rpartition(".")[2] for name, _ in module.named_modules())


def attention_sinks(module: nn.Module, passed: Any) -> Any:
    """Return GPT-OSS's sinks, a logit per head in the softmax: ``passed`` as ``s_aux``, or the module's own."""
    return getattr(module, "sinks", None) if passed is None else passed


LONGEST_WITHOUT_LIMIT = 1 << 17
"""Longest sequence of a recurrent model whose config names no limit, in tokens."""


def max_sequence_length(architecture: str, config: Any, *, is_recurrent: bool = False) -> int:
    """Return the longest sequence in tokens.

    "longrope" changes the frequencies of all tokens once a sequence is longer than the original length, so that cached
    keys would have to be computed again: sequences are served up to that length.

    Raises:
        ConfigError: The model's config names no limit.
    """
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "model_max_length", None)
    longest = longest or (LONGEST_WITHOUT_LIMIT if is_recurrent else None)
    if not isinstance(longest, int) or longest < 1:
        raise ConfigError(f"{architecture}: its config has no max_position_embeddings", field="model")
    for rope in _rope_parameters(config):
        if rope.get("rope_type") != "longrope":
            continue
        original: Any = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", longest
        )
        if original < longest:
            log.warning("rope type longrope: serving sequences up to %d of %d tokens", original, longest)
            longest = int(original)
    return longest


def original_length(config: Any, max_len: int) -> int:
    """Return the position at which scaled rope or scaled queries change; without one in the config the middle."""
    named = [config, *_rope_parameters(config)]
    lengths = [
        _get_field(holder, name) for holder in named for name in ("original_max_position_embeddings", "floor_scale")
    ]
    return next((int(length) for length in lengths if isinstance(length, int | float) and length), max_len // 2)


def _get_field(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)


def unserved_layers(config: Any) -> str:
    """Return why Baton cannot run a model's layers, from their types and other fields of its config; empty: it can."""
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or ())
    picked = [name for name in SPARSE_FIELDS if getattr(config, name, None)]
    sparse = [kind for kind in kinds if kind in SPARSE_LAYERS]
    if picked or sparse:
        budget = "".join(f" ({name} {getattr(config, name)})" for name in picked[:1])
        return f"its attention is sparse: an indexer picks the keys of each query{budget}, which Baton does not compute"
    other = [kind for kind in kinds if kind not in SERVED_LAYERS | RECURRENT_LAYERS]
    return f"Baton knows no layers of type {', '.join(other)}" if other else ""


def needed_across_stages(config: Any) -> str:
    """Return the inputs of a model's layers that the layer before does not pass on; empty: there are none.

    Pipeline stages send each other hidden states alone, whatever transformers' plan for them says.
    """
    if getattr(config, "hidden_size_per_layer_input", 0):
        return "its layers take inputs made of the token embeddings (hidden_size_per_layer_input)"
    if getattr(config, "num_kv_shared_layers", 0):
        return "its last layers attend over keys and values of earlier ones (num_kv_shared_layers)"
    return ""


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the sets of rope parameters, of which some models have one per type of layer."""
    value = getattr(config, "rope_parameters", None)
    if not isinstance(value, dict):
        return []
    if any(isinstance(item, dict) for item in value.values()):
        return [item for item in value.values() if isinstance(item, dict)]
    return [value]
