"""Multi-head latent attention (MLA): the pool stores, per token, the latent that all heads share.

Keys and values of head h are linear maps of a token's latent c [rank], and keys end with a rotary part r [rope] that
all heads share: k_h = [K_h c, r], v_h = V_h c. There are two ways to attend:

- absorbed: since q . K_h c = (K_h^T q) . c, and a sum of weighted V_h c is V_h of the weighted sum of c, a head can
  attend over [c, r] itself: one KV head for all query heads, whose values are the first ``rank`` elements of its keys.
  Both maps are applied to queries and outputs instead of to every token of the context;
- expanded: the maps are applied to the tokens of the context, and heads attend over keys and values that are shorter.

A few new tokens are absorbed, chunks of a prompt are mostly expanded.

Source: DeepSeek-V2 (https://arxiv.org/abs/2405.04434), section 2.1 and appendix C.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from baton_kernels.paged_attention.definition import AttentionSpec, LayerPool, PagedAttention


class LatentProjections:
    """The maps from latents to the keys and values of H heads.

    Args:
        weight: [H * (nope + v_dim), rank], head by head first the rows of K_h, then those of V_h; it is copied, in the
            order in which batched products read fastest.
        num_heads: Number of heads, H.
        v_dim: Size of a head's value.

    Attributes:
        key_up: Maps to keys, [H, nope, rank], contiguous.
        value_up: Maps to values, [H, rank, v_dim], contiguous.
        rank: Size of a latent.
        nope: Size of a head's key without its rotary part.
        v_dim: Size of a head's value.
    """

    def __init__(self, weight: torch.Tensor, num_heads: int, v_dim: int) -> None:
        key, value = weight.view(num_heads, -1, weight.shape[1]).tensor_split([-v_dim], dim=1)
        self.key_up = key.clone(memory_format=torch.contiguous_format)
        self.value_up = value.mT.contiguous()
        self.rank = weight.shape[1]
        self.nope = key.shape[1]
        self.v_dim = v_dim

    @property
    def shape(self) -> tuple[int, int, int]:
        """``rank``, ``nope`` and ``v_dim``."""
        return self.rank, self.nope, self.v_dim

    def expanding_pays(self, new: int, context: int, window: int = 0) -> bool:
        """Whether expanding takes fewer operations than absorbing; the times cross at the same point.

        Measured by ``benchmarks/kernels/latent_attention.py``.

        Args:
            new: Number of tokens that attend, the last ones of the sequence.
            context: Number of tokens of the sequence.
            window: Number of keys that a token sees; 0: all before it.
        """
        seen = min(context, window + new) if window else context
        pairs = min(seen, window) * new if window else new * context - new * (new - 1) // 2
        maps = self.rank * (self.nope + self.v_dim)
        saved = 2 * self.rank - self.nope - self.v_dim  # per query and key; the rotary part is in both
        return seen * maps < new * maps + pairs * saved

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Return queries over latents and rotary keys [T, H, rank + rope] for q [T, H, nope + rope]."""
        out = q.new_empty(q.shape[0], q.shape[1], self.rank + q.shape[2] - self.nope)
        out[..., : self.rank] = torch.bmm(q[..., : self.nope].transpose(0, 1), self.key_up).transpose(0, 1)
        out[..., self.rank :] = q[..., self.nope :]
        return out

    def outputs(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of values, contiguous [T, H, v_dim], for those of latents [T, H, rank]."""
        return torch.bmm(latents.transpose(0, 1), self.value_up).transpose(0, 1).contiguous()

    def expand(self, rows: torch.Tensor, heads: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys [T, H, nope + rope] and values [T, H, v_dim] of latents and rotary keys [T, rank + rope].

        Args:
            rows: Latents and rotary keys of T tokens.
            heads: The wanted heads.
        """
        latents, rotary = rows.tensor_split([self.rank], dim=1)
        keys = torch.einsum("tr,hnr->thn", latents, self.key_up[heads])
        values = torch.einsum("tr,hrv->thv", latents, self.value_up[heads])
        return torch.cat([keys, rotary[:, None].expand(-1, keys.shape[1], -1)], dim=2), values


@runtime_checkable
class LatentPagedAttention(PagedAttention, Protocol):
    """A backend that expands latents where that is faster."""

    def run_latent(
        self,
        plan: Any,
        spec: AttentionSpec,
        pool: LayerPool,
        projections: LatentProjections,
        inputs: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """See :func:`attend_latent`."""


def attend_latent(
    attention: PagedAttention,
    plan: Any,
    spec: AttentionSpec,
    pool: LayerPool,
    projections: LatentProjections,
    inputs: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Store latents and attend over them, absorbed or expanded; absorbed if the backend does not support expanding.

    Args:
        attention: The backend.
        plan: The batch's plan, from the backend's ``prepare``.
        spec: Numbers of the layer: ``latent``, one KV head, ``k_dim`` = rank + rope, ``v_dim`` = rank.
        pool: The layer's KV pool, whose v is a view of k.
        projections: Projections of this layer's H query heads on this rank.
        inputs: q [T, H, nope + rope] and latents with rotary keys [T, rank + rope], both rotated.

    Returns:
        Contiguous [T, H, v_dim of a head].
    """
    if isinstance(attention, LatentPagedAttention):
        return attention.run_latent(plan, spec, pool, projections, inputs)
    q, rows = inputs
    keys = rows[:, None]
    return projections.outputs(
        attention.run(plan, spec, pool, projections.queries(q), keys, keys[..., : projections.rank])
    )
