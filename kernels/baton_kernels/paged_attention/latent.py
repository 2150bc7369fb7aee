"""Multi-head latent attention (MLA): what is kept per token is the latent that all heads share.

Keys and values of head h are linear maps of a token's latent c [rank], and keys end with a rotary part r [rope] that
all heads share: k_h = [K_h c, r], v_h = V_h c. There are two ways to attend:

- absorbed: since q . K_h c = (K_h^T q) . c, and a sum of weighted V_h c is V_h of the weighted sum of c, a head can
  attend over [c, r] itself: one KV head for all query heads, whose values are the first ``rank`` elements of its keys.
  Both maps are applied to queries and outputs instead of to every token of the context;
- expanded: the maps are applied to the tokens of the context, and heads attend over keys and values that are shorter.

A few new tokens take the first way, chunks of a prompt mostly the second one.

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
        num_heads: H.
        v_dim: Elements of a head's value.

    Attributes:
        key_up: [H, nope, rank], contiguous.
        value_up: [H, rank, v_dim], contiguous.
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
        """Rank, and the elements of a head's key without its rotary part, and of its value."""
        return self.rank, self.nope, self.v_dim

    def expanding_pays(self, new: int, context: int, window: int = 0) -> bool:
        """Whether to expand takes fewer operations than to absorb; the times cross at the same place.

        Measured by ``benchmarks/kernels/latent_attention.py``.

        Args:
            new: Tokens that attend, the last ones of the sequence.
            context: Tokens of the sequence.
            window: Keys that a token sees; 0: all before it.
        """
        seen = min(context, window + new) if window else context
        pairs = min(seen, window) * new if window else new * context - new * (new - 1) // 2
        maps = self.rank * (self.nope + self.v_dim)
        saved = 2 * self.rank - self.nope - self.v_dim  # per query and key; the rotary part is in both
        return seen * maps < new * maps + pairs * saved

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Take q [T, H, nope + rope], return [T, H, rank + rope]: what is multiplied with latents and rotary keys."""
        out = q.new_empty(q.shape[0], q.shape[1], self.rank + q.shape[2] - self.nope)
        out[..., : self.rank] = torch.bmm(q[..., : self.nope].transpose(0, 1), self.key_up).transpose(0, 1)
        out[..., self.rank :] = q[..., self.nope :]
        return out

    def outputs(self, latents: torch.Tensor) -> torch.Tensor:
        """Take weighted sums of latents [T, H, rank], return those of values: contiguous [T, H, v_dim]."""
        return torch.bmm(latents.transpose(0, 1), self.value_up).transpose(0, 1).contiguous()

    def expand(self, rows: torch.Tensor, heads: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys [T, H, nope + rope] and values [T, H, v_dim] of latents and rotary keys [T, rank + rope].

        Args:
            rows: Of T tokens.
            heads: Those that are wanted.
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
    """Store latents and attend over them, in whichever way is fastest; absorbed where the backend knows no other.

    Args:
        attention: Any backend.
        plan: What its ``prepare`` returned.
        spec: One KV head, ``k_dim`` = rank + rope, ``v_dim`` = rank, ``latent``.
        pool: v is a view of k.
        projections: Of this layer, and of the query heads that are here.
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
