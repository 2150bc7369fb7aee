"""Multi-head latent attention (MLA) in absorbed form: what is kept per token is the latent that all heads share.

Keys and values of head h are linear maps of a token's latent c [rank], and keys end with a rotary part r [rope] that
all heads share: k_h = [K_h c, r], v_h = V_h c. Since q . K_h c = (K_h^T q) . c, and a sum of weighted V_h c is V_h of
the weighted sum of c, a head can attend over [c, r] itself: one KV head for all query heads, whose values are the first
``rank`` elements of its keys. Both maps are applied to queries and outputs instead of to every token of the context.

Source: DeepSeek-V2 (https://arxiv.org/abs/2405.04434), section 2.1 and appendix C.
"""

from __future__ import annotations

from typing import Any

import torch

from baton_kernels.paged_attention.definition import AttentionSpec, LayerPool, PagedAttention


class LatentProjections:
    """The maps from latents to the keys and values of H heads.

    Args:
        weight: [H * (nope + v_dim), rank], head by head first the rows of K_h, then those of V_h; it is copied, in the
            order in which batched products read fastest.
        num_heads: H.
        v_dim: Elements of a head's value.
    """

    def __init__(self, weight: torch.Tensor, num_heads: int, v_dim: int) -> None:
        key, value = weight.view(num_heads, -1, weight.shape[1]).tensor_split([-v_dim], dim=1)
        self._key, self._value = key.clone(), value.mT.contiguous()
        self.rank = weight.shape[1]

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Take q [T, H, nope + rope], return [T, H, rank + rope]: what is multiplied with latents and rotary keys."""
        nope = self._key.shape[1]
        out = q.new_empty(q.shape[0], q.shape[1], self.rank + q.shape[2] - nope)
        out[..., : self.rank] = torch.bmm(q[..., :nope].transpose(0, 1), self._key).transpose(0, 1)
        out[..., self.rank :] = q[..., nope:]
        return out

    def outputs(self, latents: torch.Tensor) -> torch.Tensor:
        """Take weighted sums of latents [T, H, rank], return those of values: contiguous [T, H, v_dim]."""
        return torch.bmm(latents.transpose(0, 1), self._value).transpose(0, 1).contiguous()

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys [T, H, nope + rope] and values [T, H, v_dim] of latents and rotary keys [T, rank + rope]."""
        latents, rotary = rows.tensor_split([self.rank], dim=1)
        keys = torch.einsum("tr,hnr->thn", latents, self._key)
        values = torch.einsum("tr,hrv->thv", latents, self._value)
        return torch.cat([keys, rotary[:, None].expand(-1, keys.shape[1], -1)], dim=2), values


def attend_latent(
    attention: PagedAttention,
    plan: Any,
    spec: AttentionSpec,
    pool: LayerPool,
    projections: LatentProjections,
    inputs: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Store latents and attend over them: :meth:`PagedAttention.run` of keys and values that are never expanded.

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
    q, rows = inputs
    keys = rows[:, None]
    return projections.outputs(
        attention.run(plan, spec, pool, projections.queries(q), keys, keys[..., : projections.rank])
    )
