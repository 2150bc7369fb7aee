"""Tiny random checkpoints of every causal language model that the installed transformers knows, made from its configs.

A config's fields are shrunk by their names; what a type needs beyond that stands in :data:`OVERRIDES`. Rope is scaled
(yarn) where a type has rope of the usual kind, so that sequences reach beyond the original context length.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from safetensors.torch import save_file
from tests.support.servers.warm import WarmStarter
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from baton.config import EngineConfig
from baton.engine.communicator import Communicator
from baton.engine.executor import multiprocess
from baton.engine.executor.base import load_executor
from baton.engine.models.loader import quiet_transformers
from baton.engine.models.parallel import divide
from baton.engine.models.quirks import unserved_layers
from baton.engine.runner.model_runner import WholeModel, load_whole
from baton.errors import ConfigError
from baton.kv_cache.shards import shard_specs

VOCAB = 512
MAX_LEN = 384
ORIGINAL_LEN = 96

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "emb_dim", "embedding_size"), 64),
    "word_embed_proj_dim": 64,
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("n_inner", "dim_ff", "dff"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    "hidden_size_per_layer_input": 16,
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "dim_head"), 16),
    "rotary_dim": 8,
    "sliding_window": 24,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), MAX_LEN),
    "model_max_length": MAX_LEN,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "zero_expert_num"), 2),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": 4},
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "v_head_dim": 12,
    "initializer_range": 0.35,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}
"""Sizes by the names that configs have for them."""

MLA_SIZES: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
"""Of latent attention: as many KV heads as query heads, and ``head_dim`` is what is rotated."""

CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2}
DROPS_PARTS: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 4,
}

MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
MAMBA |= {"mamba_chunk_size": 16, "mamba_expand": 2}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [3], **MAMBA},
    "falcon_h1": {"mamba_d_ssm": 64, **MAMBA, "mamba_n_heads": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "mamba", "attention"], **MAMBA},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 3, "mamba_d_state": 8, "mamba_dt_rank": 8},
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"state_size": 16, "num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 1, "chunk_size": 16},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "mamba", "attention"],
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16},
        "moe_shared_expert_intermediate_size": 32,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
        **{"mamba_d_state": 16, "n_mamba_heads": 8, "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 16},
        **{"num_mem_blocks": 1, "attention_head_dim": 32},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32},
    },
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {
        "intermediate_size": [96] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
    },
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **DROPS_PARTS}},
    "lfm2": CONV,
    "lfm2_moe": CONV,
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2},
    "moshi": {"sliding_window": MAX_LEN},
    "qwen2_moe": {"use_sliding_window": False},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a type needs beyond, or instead of, :data:`SMALL`."""

KEEPS_ROPE = frozenset({"mimo_v2_flash", "ministral3", "phi3", "phi4_multimodal", "phimoe"})
"""Types whose own rope is scaled already, or of another kind."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model type, maybe with fields of its config that change what it computes."""

    model_type: str
    variant: str = ""
    changes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.model_type}-{self.variant}" if self.variant else self.model_type


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


_FACTOR = MAX_LEN / ORIGINAL_LEN
_ORIGINAL: dict[str, Any] = {"factor": _FACTOR, "original_max_position_embeddings": ORIGINAL_LEN}
VARIANTS = [
    Case("llama", "default", _rope("default")),
    Case("llama", "linear", _rope("linear", factor=_FACTOR)),
    Case("llama", "dynamic", _rope("dynamic", factor=_FACTOR)),
    Case("llama", "llama3", _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **_ORIGINAL)),
    Case(
        "phi3",
        "longrope",
        _rope("longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8)
        | {"original_max_position_embeddings": ORIGINAL_LEN},
    ),
    Case("ministral3", "scaled-queries", _rope("yarn", llama_4_scaling_beta=2.0, **_ORIGINAL)),
    Case("llama4_text", "scaled-queries", {"floor_scale": 64, "attn_scale": 1.0}),
    Case("llama4_text", "chunks", {"attention_chunk_size": 64}),
    Case("granite", "multipliers", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    Case("gemma4_text", "shared-kv", {"num_kv_shared_layers": 2}),
    Case("gemma4_unified_text", "shared-kv", {"num_kv_shared_layers": 2}),
    Case("qwen2", "windows", {"use_sliding_window": True, "max_window_layers": 2}),
]
"""What a type's config can ask for beside its own defaults."""


def cases() -> list[Case]:
    """Return a case per type of causal language model that transformers knows, and the variants."""
    return [*(Case(kind) for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)), *VARIANTS]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case.

    Attributes:
        model: Transformers', to be compared with; ``None`` if it is refused.
        path: ``fused`` or ``generic``; empty if it is refused.
        longest: Tokens of the longest sequence; 0 if it is refused.
        refusal: Why it is refused, without figures; empty if it is served.
    """

    model: Any
    path: str
    longest: int
    refusal: str


def outcome(case: Case, folder: Path) -> Outcome:
    """Write a checkpoint and have an engine load it; weights are made only if it comes to reading them."""
    write_config(case, folder)
    try:
        load_executor(EngineConfig(model=str(folder), dtype="float32"))
    except ConfigError as error:
        if "missing keys" not in error.message:
            return Outcome(None, "", 0, _reason(error, case, folder))
    model = make_model(case, folder)
    try:
        executor = load_executor(EngineConfig(model=str(folder), dtype="float32"))
    except ConfigError as error:
        return Outcome(None, "", 0, _reason(error, case, folder))
    path = "fused" if executor.description.startswith("fused") else "generic"
    return Outcome(model, path, executor.max_model_len, "")


def table_cells(case: Case, folder: Path, starter: WarmStarter) -> tuple[str, ...]:
    """Return what docs/models.md says of a case: path, tp, pp, notes."""
    found = outcome(case, folder)
    if found.model is None:
        return ("refused", "", "", found.refusal)
    with mock.patch.object(multiprocess, "start_follower", partial(_start_follower, starter)):
        refusals = {name: _refusal_on_two_ranks(folder, name) for name in ("tp", "pp")}
    notes = division_notes(refusals)
    if found.longest < MAX_LEN:
        notes.insert(0, f"sequences up to {found.longest} of {MAX_LEN} tokens")
    can = ["no" if why else "yes" for why in refusals.values()]
    return (found.path, *can, "; ".join(notes))


TABLE_HEAD = "| types | path | tp | pp | notes |\n| --- | --- | --- | --- | --- |\n"


def render_table(cells: Mapping[str, tuple[str, ...]]) -> str:
    """Return the table of docs/models.md: a row for all cases of which it says the same, the fastest path first."""
    cases_by_cells: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(cells):
        cases_by_cells.setdefault(cells[name], []).append(name)
    order = ("fused", "generic", "refused")
    rows = sorted(cases_by_cells.items(), key=lambda row: (order.index(row[0][0]), -len(row[1]), row[1]))
    lines = [f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(row)} |" for row, names in rows]
    return TABLE_HEAD + "\n".join(lines) + "\n"


def read_table(text: str) -> dict[str, tuple[str, ...]]:
    """Return path, tp, pp and notes by the name of the case."""
    cells = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            names, *rest = [cell.strip() for cell in line.strip("|").split("|")]
            cells |= {name.strip("`"): tuple(rest) for name in names.split(", ")}
    return cells


def division_notes(refusals: dict[str, str]) -> list[str]:
    """What a row's notes say of ``tp`` and ``pp``: why not."""
    reasons = {name: why.removeprefix("its ") for name, why in refusals.items() if why}
    if len(reasons) == 2 and len(set(reasons.values())) == 1:
        return [f"tp, pp: {reasons['tp']}"]
    return [f"{name}: {why}" for name, why in reasons.items()]


def refusals_of_two_ranks(folder: Path) -> dict[str, str]:
    """Say for ``tp`` and ``pp`` why a model cannot be divided in two, by cutting it and running nothing."""
    whole = load_whole(EngineConfig(model=str(folder), dtype="float32"))
    return {"tp": _refusal_of_cut(whole, 2, 1), "pp": _refusal_of_cut(whole, 1, 2)}


def _refusal_of_cut(whole: WholeModel, tp: int, pp: int) -> str:
    for spec in shard_specs(tp, pp):
        part = copy_of(whole)
        try:
            divide(part.model, part.specs, Communicator(spec))
        except ConfigError as error:
            return _division_reason(error, "tp" if tp > 1 else "pp")
    return ""


def copy_of(whole: WholeModel) -> WholeModel:
    """Return a model with modules of its own, to be cut."""
    names = {id(module): name for name, module in whole.model.module.named_modules()}
    module = copy.deepcopy(whole.model.module)
    specs = {id(module.get_submodule(names[key])): spec for key, spec in whole.specs.items()}
    return dataclasses.replace(whole, model=dataclasses.replace(whole.model, module=module), specs=specs)


def _start_follower(starter: WarmStarter, line: socket.socket) -> Any:
    return starter.start("baton.engine.executor.follower", [str(line.fileno())], keep=line.fileno())


def _refusal_on_two_ranks(folder: Path, name: str) -> str:
    """Say why a model cannot be divided in two over ``tp`` or ``pp``; nothing if it can."""
    config = EngineConfig(model=str(folder), dtype="float32", executor="multiprocess", **{name: 2})  # type: ignore[arg-type]
    try:
        load_executor(config).close()
    except ConfigError as error:
        return _division_reason(error, name)
    return ""


def _division_reason(error: ConfigError, name: str) -> str:
    """What a refusal to divide a model over ``name`` says behind the class's name, without figures."""
    text = error.message.partition(f"divided over {name}: ")[2] or error.message.partition(" stages: ")[2]
    text = text or error.message.partition("cannot be ")[2] or error.message
    return re.sub(r" \(attention[^)]*\)", "", text)


def _reason(error: ConfigError, case: Case, folder: Path) -> str:
    """What a refusal says behind the class's name, without that name, paths, figures and what a package adds."""
    text = error.message.replace(f" in {str(folder)!r}", "").partition(" cannot be served: ")[2] or error.message
    text = re.sub(r" \((attention|index)[^)]*\)", "", text.replace(f" in {str(folder)!r}", ""))
    text = text.replace(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[case.model_type], "the model")
    return text.partition(" but it was not found")[0]


def make_config(case: Case) -> Any:
    """Return a small config, with scaled rope where it has rope of the usual kind."""
    cls: Any = CONFIG_MAPPING[case.model_type]
    changes = {**OVERRIDES.get(case.model_type, {}), **case.changes}
    config = cls(**_small_fields(cls, changes))
    if not case.variant and case.model_type not in KEEPS_ROPE:
        scaled = _scaled(getattr(config, "rope_parameters", None))
        if scaled:
            config = cls(**_small_fields(cls, {**changes, "rope_parameters": scaled}))
    return config


def _scaled(rope: Any) -> dict[str, Any] | None:
    """Return rope parameters of type "default" as yarn's, also where there are some per type of layer."""
    if not isinstance(rope, dict):
        return None
    if rope.get("rope_type") == "default":
        return {**rope, "rope_type": "yarn", **_ORIGINAL}
    parts = {name: _scaled(value) or value for name, value in rope.items()}
    return parts if parts != rope else None


def _small_fields(cls: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Return fields for a config class, those of nested configs among them."""
    try:
        default = cls()
    except Exception:  # its own defaults do not fit together: only what is given
        return {name: _nested(value) for name, value in changes.items()}
    known = default.to_dict()
    fields = {name: value for name, value in SMALL.items() if name in known}
    if "kv_lora_rank" in fields:
        fields.update({name: value for name, value in MLA_SIZES.items() if name in known})
    kinds = list(dict.fromkeys(known.get("layer_types") or ()))
    if len(kinds) > 1:
        fields["layer_types"] = [kinds[i % len(kinds)] for i in range(4)]
    for name in (name for name, value in known.items() if isinstance(value, dict)):
        nested = getattr(default, name, None)
        if hasattr(nested, "to_dict"):
            fields[name] = _small_fields(type(nested), changes.get(name, {}))
    return fields | {
        name: value for name, value in changes.items() if name not in fields or not isinstance(fields[name], dict)
    }


def _nested(value: Any) -> Any:
    """Return a nested config that is given by its type with small fields."""
    if not isinstance(value, dict) or "model_type" not in value:
        return value
    changes = {name: item for name, item in value.items() if name != "model_type"}
    cls: Any = CONFIG_MAPPING[value["model_type"]]
    return cls(**_small_fields(cls, changes))


def write_config(case: Case, folder: Path) -> None:
    """Write a checkpoint without weights, for types that are refused before any are read."""
    try:
        config = make_config(case)
    except Exception:
        # Sizes that do not fit together matter only where weights are read.
        config = cast(Any, CONFIG_MAPPING[case.model_type])()
        model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
        served = model_class._supports_attention_backend and not model_class._is_stateful
        if served and not unserved_layers(config.get_text_config(decoder=True)):
            raise
    with quiet_transformers():
        config.save_pretrained(folder)
    save_file({}, folder / "model.safetensors", metadata={"format": "pt"})


def make_model(case: Case, folder: Path, *, seed: int = 0) -> Any:
    """Write a checkpoint of random float32 weights without a tokenizer, and return the model that is loaded from it.

    That may be another one than was written: Youtu, for one, loads the padding token's embedding as zeros.
    """
    config = make_config(case)
    with torch.random.fork_rng(), quiet_transformers():
        torch.manual_seed(seed)
        model = cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32, attn_implementation="eager")
        randomize(model)
        model.generation_config = cast(Any, GenerationConfig)(bos_token_id=1, eos_token_id=2, pad_token_id=0)
        model.save_pretrained(folder)
        if AutoModelForCausalLM._model_mapping.get(type(model.config), None) is None:
            config.save_pretrained(folder)
        loaded: Any = cast(Any, AutoModelForCausalLM).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    return loaded.eval()


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
