"""An attention backend as another package would bring it: gathers each sequence's blocks and attends densely."""

from __future__ import annotations

from typing import Any

import torch

from baton.engine.attention import AttentionContext
from baton.errors import ConfigError
from baton_kernels.paged_attention import AttentionSpec, LayerPool, RaggedBatch


class GatherAttention:
    """Implements :class:`baton_kernels.paged_attention.PagedAttention` for causal layers on a CPU."""

    name = "gather"
    reach = 0
    """Keys after a query that it sees too: anything but 0 is wrong."""

    def prepare(self, batch: RaggedBatch) -> Any:
        """Nothing to prepare."""
        return batch

    def run(
        self, plan: Any, spec: AttentionSpec, pool: LayerPool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Store k and v and return attention of q."""
        size, out = plan.block_size, []
        for i, context in enumerate(plan.context_lens.tolist()):
            rows = slice(int(plan.query_starts[i]), int(plan.query_starts[i + 1]))
            table = torch.from_numpy(plan.block_tables[i]).long()
            at = torch.from_numpy(plan.positions[rows])
            pool.k[table[at // size], :, at % size] = k[rows]
            pool.v[table[at // size], :, at % size] = v[rows]
            used = table[: -(-context // size)]
            keys, values = (part[used].transpose(0, 1).flatten(1, 2)[:, :context] for part in (pool.k, pool.v))
            mask = torch.arange(context)[None] <= at[:, None] + self.reach
            heads = torch.nn.functional.scaled_dot_product_attention(
                *(q[rows].transpose(0, 1)[None], keys[None], values[None]),
                attn_mask=mask,
                scale=spec.scale,
                enable_gqa=True,
            )
            out.append(heads[0].transpose(0, 1))
        return torch.cat(out).contiguous()


class FarsightedAttention(GatherAttention):
    """Sees one key too many, where there is one."""

    name = "farsighted"
    reach = 1


def make_gather(context: AttentionContext) -> GatherAttention:
    """Make the backend."""
    if context.device.type != "cpu":
        raise ConfigError(f"attention_backend gather needs a CPU, not {context.device}", field="attention_backend")
    return GatherAttention()


def make_farsighted(context: AttentionContext) -> GatherAttention:
    """Make one that is wrong."""
    return FarsightedAttention()
