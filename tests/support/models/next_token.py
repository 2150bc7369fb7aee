"""Tiny checkpoints with next-token layers in the forms that are published, and what such a layer drafts, plainly."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from tests.support.models.architectures import Case, make_model, randomize
from torch import nn
from transformers import AutoModelForCausalLM

from baton.engine.models.loader import quiet_transformers

Rename = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Form:
    """How a type's checkpoints keep such a layer.

    Attributes:
        layer: Of the names of its parts, behind ``model.layers.0.`` of a model of one layer.
        apart: Names of the norms of embedding and state, of the projection, and of the norm behind.
        config: What is different in the config of a model of such a layer.
        copies: Whether embedding and head are there again.
    """

    layer: Rename
    apart: tuple[str, str, str, str]
    config: dict[str, Any]
    copies: bool = False


def _inside(layer: str, norm: str, config: dict[str, Any], *, copies: bool = False, **renamed: str) -> Form:
    def rename(name: str) -> str:
        for ours, theirs in renamed.items():
            name = name.replace(ours, theirs)
        return f"{layer}.{name}"

    return Form(rename, tuple(f"{layer}.{part}" for part in ("enorm", "hnorm", "eh_proj", norm)), config, copies)  # type: ignore[arg-type]


_BESIDE = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
_ERNIE = ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", "")
FORMS = {
    "deepseek_v3": _inside("model.layers.4", "shared_head.norm", {"first_k_dense_replace": 0}, copies=True),
    "ernie4_5_moe": Form(lambda name: f"model.mtp_block.0.{name}", _ERNIE, {"moe_layer_start_index": 9}),
    "exaone_moe": Form(
        lambda name: f"mtp.layers.0.{name}",
        _BESIDE,
        {"layer_types": ["full_attention"], "mlp_layer_types": ["dense"]},
    ),
    "glm4_moe": _inside("model.layers.4", "shared_head.norm", {"first_k_dense_replace": 0}, copies=True),
    "glm4_moe_lite": _inside("model.layers.4", "shared_head.norm", {"mlp_layer_types": ["sparse"]}),
    "hy_v3": _inside("model.layers.4", "final_layernorm", {"mlp_layer_types": ["sparse"]}),
    "mellum": Form(
        lambda name: f"mtp.layers.0.{name}",
        _BESIDE,
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["sparse"]},
    ),
    "mimo_v2_flash": _inside(
        "model.mtp.layers.0",
        "final_layernorm",
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        post_attention_layernorm="pre_mlp_layernorm",
    ),
}


@dataclass(frozen=True, slots=True)
class NextToken:
    """A checkpoint with a next-token layer.

    Attributes:
        folder: Where it is.
        main: The model.
        one: A model of the layer alone.
        norms: Of embeddings and hidden states, each [width].
        projection: [width, 2 * width].
    """

    folder: Path
    main: Any
    one: Any
    norms: tuple[torch.Tensor, torch.Tensor]
    projection: torch.Tensor

    @torch.inference_mode()
    def draft(self, tokens: list[int], count: int) -> list[int]:
        """Return the ``count`` likeliest next tokens, one after the other, by transformers' modules."""
        known = self.main(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
        hidden, slots, found = list(known[: len(tokens) - 1]), tokens[1:], list[int]()
        for _ in range(count):
            out = self.states(slots, torch.stack(hidden))[-1]
            found.append(int(self.main.get_output_embeddings()(out).argmax()))
            slots = [*slots, found[-1]]
            hidden.append(out)
        return found

    @torch.inference_mode()
    def states(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's states [T, width] over tokens and the hidden states [T, width] of those before."""
        both = [self.main.get_input_embeddings()(torch.tensor(tokens)), hidden]
        eps = self.main.config.rms_norm_eps
        normed = [
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w for x, w in zip(both, self.norms, strict=True)
        ]
        inputs = torch.cat(normed, -1) @ self.projection.T
        return cast(torch.Tensor, self.one.base_model(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0])


def write_next_token(folder: Path, kind: str, *, seed: int = 0, **changes: Any) -> NextToken:
    """Write a tiny float32 checkpoint of a model type with a next-token layer; ``changes``: to the model's config."""
    form = FORMS[kind]
    own_changes = {"num_mtp_layers": 1} if kind == "mellum" else {}
    main = make_model(Case(kind, changes=own_changes | changes), folder, seed=seed)
    config = copy.deepcopy(main.config)
    for name, value in {"num_hidden_layers": 1, **form.config}.items():
        setattr(config, name, value)
    width = int(config.hidden_size)
    with torch.random.fork_rng(), quiet_transformers():
        torch.manual_seed(seed + 1)
        one = cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.float32, attn_implementation="eager")
        randomize(one)
        one.save_pretrained(folder / "one")
        norms = (1 + 0.2 * torch.randn(width), 1 + 0.2 * torch.randn(width))
        projection = torch.randn(width, 2 * width) * (2 * width) ** -0.5
    path = next((folder / "one").glob("*.safetensors"))
    parts, tensors = load_file(path), load_file(folder / "model.safetensors")
    for used in (folder / "one").iterdir():
        used.unlink()
    (folder / "one").rmdir()
    for name, tensor in parts.items():
        if name.startswith("model.layers.0."):
            tensors[form.layer(name.removeprefix("model.layers.0."))] = tensor
    own = [*norms, projection, parts["model.norm.weight"]]
    tensors |= {f"{name}.weight": tensor for name, tensor in zip(form.apart, own, strict=True) if name}
    if form.copies:
        tensors["model.layers.4.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.4.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if not form.apart[3]:
        one.base_model.norm = nn.Identity()
    return NextToken(folder, main, one.eval(), norms, projection)


def change_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Replace a tensor of a checkpoint of one file; ``None``: take it out."""
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    """Change fields of a checkpoint's config."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
