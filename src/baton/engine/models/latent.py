"""Multi-head latent attention: has modules pass on the latent that heads share, instead of each head's keys and values.

transformers' modules of this kind compute a latent and a rotary key per token, expand both in ``expand_kv`` and attend
over the result. Here that method gives them on as they are, the pool keeps them, and the projection is applied to
queries and outputs (:mod:`baton_kernels.paged_attention.latent`). All else of a module stays transformers' own.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import nn

from baton.engine.models.loader import LoadedModel
from baton.engine.models.quirks import LATENT_EXPANSION, LATENT_PROJECTION
from baton_kernels.paged_attention import AttentionSpec, LatentProjections

log = logging.getLogger(__name__)

CHECKED_TOKENS = 3
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
"""Largest |difference| / |expansion| of one that is linear in the latent, head by head."""


def compress(model: LoadedModel, attention: dict[int, AttentionSpec]) -> dict[int, AttentionSpec]:
    """Return the attention of a model's layers with latents in place of keys and values that expand from them.

    Args:
        model: Whole.
        attention: What each layer attends over as its module stands, by the id of the module.
    """
    modules = {id(module): module for module in model.module.modules() if id(module) in attention}
    return {key: _over_latents(model, modules[key], spec) for key, spec in attention.items()}


def absorb(model: LoadedModel, attention: dict[int, AttentionSpec]) -> dict[int, LatentProjections]:
    """Have the modules that attend over latents pass these on, in place.

    Such a module then calls its attention function with the latents [1, 1, T, rank] as keys and the rotary keys
    [1, 1, T, rope] as values.

    Args:
        model: This rank's share.
        attention: Of this rank, by the id of the module.

    Returns:
        The projections that queries and outputs have to go through, by the id of the module.
    """
    found = {}
    for module in model.module.modules():
        spec = attention.get(id(module))
        if spec is not None and spec.latent:
            held: Any = module
            weight = getattr(held, LATENT_PROJECTION).weight.detach()
            found[id(module)] = LatentProjections(weight, spec.num_heads, held.v_head_dim)
            delattr(held, LATENT_PROJECTION)  # or its weight would be packed too
            setattr(held, LATENT_EXPANSION, _as_they_are)
    return found


def _as_they_are(latents: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latents, rotary


def _over_latents(model: LoadedModel, module: Any, spec: AttentionSpec) -> AttentionSpec:
    """The attention of a layer over latents, or as it is if its keys and values are anything else."""
    up: Any = getattr(module, LATENT_PROJECTION, None)
    expand: Any = getattr(module, LATENT_EXPANSION, None)
    if type(up) is not nn.Linear or expand is None or getattr(module, "v_head_dim", None) != spec.v_dim:
        return spec
    rank, nope = up.in_features, up.out_features // spec.num_heads - spec.v_dim
    rope = spec.k_dim - nope
    bias: Any = up.bias
    if bias is not None or spec.kv_heads != spec.num_heads or rope < 0 or nope < 1:
        return spec
    projections = LatentProjections(up.weight.detach(), spec.num_heads, spec.v_dim)
    with torch.inference_mode():
        rows = torch.randn(CHECKED_TOKENS, rank + rope, generator=torch.Generator().manual_seed(0))
        rows = rows.to(up.weight)
        latents, rotary = rows.tensor_split([rank], dim=1)
        theirs = torch.cat(expand(latents[None, None], rotary[None, None]), dim=-1)[0].transpose(0, 1).float()
        mine = torch.cat(projections.expand(rows), dim=-1).float()
    if theirs.shape != mine.shape or not (theirs - mine).norm() <= TOLERANCE[model.dtype] * mine.norm():
        log.warning("%s: its latents expand in a way of their own: keys and values are kept", model.architecture)
        return spec
    return dataclasses.replace(spec, kv_heads=1, k_dim=rank + rope, v_dim=rank, latent=True)
