"""The fast path: decoder stacks of well-known shapes, run by hand over fused and packed operators.

Taken for the model types that are listed in :mod:`quirks <baton.engine.models.quirks>`, if their parts are those that
are expected. Per layer: norm, QKV in one linear, attention (which norms heads, rotates, writes the KV and attends; or
works over latents), output with residual, norm, gate and up in one linear, their product, down with residual; or the
experts of a mixture. Where a norm follows attention or MLP (Gemma, OLMo, GLM 4), it adds the residual. The runner uses
this path only after it gave the same logits as transformers' own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from baton.engine.models.fused_layers import LayerMaker, NotFusableError, known_stack
from baton.engine.models.layer_operators import LayerOperators, RowNorm
from baton.engine.models.layer_program import MOST_ROWS, LayerProgram, UnboundError
from baton.engine.models.loader import TORCH_DTYPES, LoadedModel
from baton.engine.models.parallel import Share
from baton_kernels.linear import PackedLinear
from baton_kernels.paged_attention import LayerPool, RotatingAttention
from baton_kernels.paged_attention.cpu import CpuPagedAttention

__all__ = ["FusedDecoder", "NotFusableError"]


class FusedDecoder:
    """A whole decoder, or one rank's share of it; see the module's docstring.

    Attributes:
        on_layer: Called with a layer's index once its KV is in the pools of all ranks that share it.
    """

    def __init__(
        self,
        model: LoadedModel,
        share: Share,
        max_len: int,
        operators: LayerOperators,
        attention: RotatingAttention,
    ) -> None:
        """Build the operators from a model's modules, whose weights stay as they are.

        Raises:
            NotFusableError: The model has another shape.
        """
        ranks = share.communicator
        stack, layers, family = known_stack(model, share)
        self.on_layer: Callable[[int], None] | None = None
        self._attention = attention
        self._communicator, self._first_layer = ranks, share.first_layer
        self._dtype = TORCH_DTYPES[model.dtype]
        self._embedding = stack.embed_tokens.weight.detach() if ranks.is_first_stage else None
        scale = getattr(stack.embed_tokens, "embed_scale", None)
        self._embedding_scale = None if scale is None else scale.to(self._dtype)
        maker = LayerMaker(model, share, max_len, family, operators)
        self._layers = [maker.layer(index, layer) for index, layer in enumerate(layers)]
        self._norm = maker.norm(stack.norm) if ranks.has_head else None
        self._head = maker.linear(model.module.lm_head) if ranks.has_head else None
        self._softcap = float(getattr(model.text_config, "final_logit_softcapping", None) or 0.0)
        self._program = self._make_program()

    def _make_program(self) -> LayerProgram | None:
        """Bind the layers' operators to memory, where they are such that can be bound."""
        ranks = self._communicator
        if not isinstance(self._attention, CpuPagedAttention) or ranks.splits_heads or not ranks.is_last_stage:
            return None
        try:
            return LayerProgram(self._layers, self._attention, self._layers[0].output.out_features, self._dtype)
        except UnboundError:
            return None

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        plan: Any,
        pools: list[LayerPool],
        hidden_of: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run tokens int64 [T] through this rank's layers; ``positions`` are those of ``plan``.

        Returns:
            The logits [R, vocab] of ``rows`` int64 [R], or [0, 0] on a rank that has no head, and the hidden states
            [T, width] of ``hidden_of``, or none if this rank does not have all of them.
        """
        kept: dict[int, torch.Tensor] = {}
        ranks = self._communicator
        if self._embedding is not None:
            hidden = F.embedding(tokens, self._embedding)
            if self._embedding_scale is not None:
                hidden = hidden * self._embedding_scale
        else:
            hidden = ranks.receive_hidden((len(tokens), self._layers[0].output.out_features), self._dtype)
        if self._program is not None and len(tokens) <= MOST_ROWS and not hidden_of:
            hidden = self._program.run(hidden, plan, pools, self.on_layer, self._first_layer)
        else:
            hidden = self._run_layers(hidden, positions, plan, pools, hidden_of, kept)
        if not ranks.is_last_stage:
            ranks.send_hidden(hidden)
        if self._head is None or self._norm is None:
            return hidden.new_empty((0, 0)), ()
        if -1 in hidden_of:
            kept[-1] = self._norm(hidden)
        hidden = kept[-1][rows] if -1 in kept else self._norm(hidden[rows])
        logits = self._head(hidden)
        if self._softcap:
            logits = logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits, tuple(kept[each] for each in hidden_of) if len(kept) == len(set(hidden_of)) else ()

    def _run_layers(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        plan: Any,
        pools: list[LayerPool],
        hidden_of: tuple[int, ...],
        kept: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """Run the layers operator by operator; keep the inputs of those in ``hidden_of``."""
        backend, on_layer, add = self._attention, self.on_layer, self._add
        splits_heads = self._communicator.splits_heads
        for index, (layer, pool) in enumerate(zip(self._layers, pools, strict=True), self._first_layer):
            if index in hidden_of:
                kept[index] = hidden
            inner = hidden if layer.attention_norm is None else layer.attention_norm(hidden)
            out = layer.attention(backend, plan, pool, inner, positions)
            if on_layer is not None and not splits_heads:
                on_layer(index)
            hidden = add(layer.output, out, hidden, layer.attention_out_norm)
            if on_layer is not None and splits_heads:
                on_layer(index)
            inner = hidden if layer.mlp_norm is None else layer.mlp_norm(hidden)
            hidden = add(layer.mlp, inner, hidden, layer.mlp_out_norm)
        return hidden

    def _add(
        self,
        part: PackedLinear | Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
        x: torch.Tensor,
        hidden: torch.Tensor,
        norm: RowNorm | None,
    ) -> torch.Tensor:
        """Return ``hidden + norm(part(x))``, with all ranks' parts summed before the norm."""
        ranks = self._communicator
        if norm is None:
            out = part(x, hidden if ranks.spec.tp_rank == 0 else None)
            return ranks.all_reduce(out) if ranks.splits_heads else out
        out = part(x, None)
        return norm(ranks.all_reduce(out) if ranks.splits_heads else out, hidden)
