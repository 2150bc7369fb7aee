"""The fast path: decoder stacks of well-known shapes, run over fused and packed operators.

It serves the model types that :mod:`quirks <baton.engine.models.quirks>` lists, if their parts are the expected ones.
Per layer: norm, QKV in one linear, attention (which norms heads, rotates, writes the KV and attends; or works over
latents), output with residual, norm, gate and up in one linear, their product, down with residual; or the experts of a
mixture. Where a norm follows attention or MLP (Gemma, OLMo, GLM 4), it adds the residual. The runner uses this path
only after it gave the same logits as transformers' own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from baton.engine.models.fused_layers import (
    FusedLayer,
    GatedMlp,
    HeadAttention,
    LayerMaker,
    NotFusableError,
    known_stack,
    split_heads,
)
from baton.engine.models.layer_operators import LayerOperators, RowNorm
from baton.engine.models.loader import TORCH_DTYPES, LoadedModel
from baton.engine.models.parallel import Share
from baton_kernels.cpu.library import BindableOperator, BoundCall, NativeCalls
from baton_kernels.linear import PackedLinear
from baton_kernels.paged_attention import LayerPool, RotatingAttention
from baton_kernels.paged_attention.cpu import BoundAttention, CpuPagedAttention, CpuPlan

__all__ = ["FusedDecoder", "LayerProgram", "NotFusableError", "UnboundError"]


class FusedDecoder:
    """A whole decoder, or one rank's share of it; see the module's docstring.

    Attributes:
        on_layer: Called with a layer's index once its KV is in the pools of all ranks that share the layer.
    """

    def __init__(
        self,
        model: LoadedModel,
        share: Share,
        max_len: int,
        operators: LayerOperators,
        attention: RotatingAttention,
    ) -> None:
        """Build the operators from a model's modules, which are not changed.

        Args:
            model: The model, cut down to this rank's share.
            share: This rank's layers and heads.
            max_len: Longest sequence, in tokens.
            operators: Makes the operators.
            attention: Attention backend.

        Raises:
            NotFusableError: The model has parts that the fused decoder does not know.
        """
        ranks = share.communicator
        stack, layers, family = known_stack(model, share)
        self.on_layer: Callable[[int], None] | None = None
        self._attention = attention
        self._communicator = ranks
        self._first_layer = share.first_layer
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
        """Bind the layers' operators to memory; ``None``: they cannot be bound."""
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
        """Run tokens through this rank's layers.

        Arguments and results are those of :meth:`.GenericDecoder.forward`; a rank without a head has logits [0, 0].
        """
        states: dict[int, torch.Tensor] = {}
        ranks = self._communicator
        if self._embedding is not None:
            hidden = F.embedding(tokens, self._embedding)
            if self._embedding_scale is not None:
                hidden = hidden * self._embedding_scale
        else:
            hidden = ranks.receive_hidden((len(tokens), self._layers[0].output.out_features), self._dtype)
        if self._program is not None and len(tokens) <= MAX_ROWS and not hidden_of:
            hidden = self._program.run(hidden, plan, pools, self.on_layer, self._first_layer)
        else:
            hidden = self._run_layers(hidden, positions, plan, pools, hidden_of, states)
        if not ranks.is_last_stage:
            ranks.send_hidden(hidden)
        if self._head is None or self._norm is None:
            return hidden.new_empty((0, 0)), ()
        if -1 in hidden_of:
            states[-1] = self._norm(hidden)
        hidden = states[-1][rows] if -1 in states else self._norm(hidden[rows])
        logits = self._head(hidden)
        if self._softcap:
            logits = logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits, tuple(states[each] for each in hidden_of) if len(states) == len(set(hidden_of)) else ()

    def _run_layers(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        plan: Any,
        pools: list[LayerPool],
        hidden_of: tuple[int, ...],
        states: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """Run the layers operator by operator; add the inputs of those in ``hidden_of`` to ``states``."""
        backend = self._attention
        on_layer = self.on_layer
        add = self._add
        splits_heads = self._communicator.splits_heads
        for index, (layer, pool) in enumerate(zip(self._layers, pools, strict=True), self._first_layer):
            if index in hidden_of:
                states[index] = hidden
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


MAX_ROWS = 256
"""Largest number of tokens of a step; the program has memory for so many."""


class UnboundError(Exception):
    """A layer has a part that cannot be bound; the message names it."""


class LayerProgram:
    """All layers as one list of calls into the C++ operators, bound to memory of their own.

    Operator by operator a layer costs 70 µs of Python beside its work, and releases and takes the interpreter's lock
    eight times, each time behind other threads that want it. As a list, all layers of a step cost what one call does.
    It is for layers that consist of nothing but such calls: head-wise attention and a gated MLP, plain or quantized, on
    one rank; and for steps of up to ``MAX_ROWS`` tokens, beyond which the operators' own work dominates.

    Not thread-safe, and each run overwrites the result of the one before.

    Args:
        layers: The layers, in their order.
        attention: The attention operator.
        width: Size of the hidden states.
        dtype: Dtype of the hidden states.

    Raises:
        UnboundError: A layer has a part that cannot be bound.
    """

    def __init__(
        self, layers: Sequence[FusedLayer], attention: CpuPagedAttention, width: int, dtype: torch.dtype
    ) -> None:
        self._attention = attention
        self._hidden = torch.empty(MAX_ROWS, width, dtype=dtype)
        # Each operator's result is read by the next operator alone, so two pieces of memory suffice.
        sizes = (MAX_ROWS * max(width, *each) for each in zip(*map(_widths, layers), strict=True))
        self._even, self._odd = (torch.empty(size, dtype=dtype) for size in sizes)
        self._attentions: list[BoundAttention] = []
        self._attended: list[int] = []
        self._list: list[BoundCall] = []
        for layer in layers:
            self._bind(layer)
        self._calls = NativeCalls(attention.library, self._list)

    def run(
        self,
        hidden: torch.Tensor,
        plan: CpuPlan,
        pools: Sequence[LayerPool],
        on_layer: Callable[[int], None] | None,
        first_layer: int,
    ) -> torch.Tensor:
        """Run all layers over hidden states [T, width], T at most ``MAX_ROWS``.

        Args:
            hidden: Inputs of the first layer; they are not changed.
            plan: The attention operator's plan of this batch.
            pools: KV pools of the layers.
            on_layer: Called with a layer's index as soon as its KV is in its pool; or ``None``.
            first_layer: Index of the first layer.

        Returns:
            Hidden states [T, width], in memory that the next run overwrites.
        """
        rows = len(hidden)
        self._hidden[:rows].copy_(hidden)
        self._calls.resize(rows, torch.get_num_threads())
        for bound, pool in zip(self._attentions, pools, strict=True):
            bound.set_batch(plan, pool)
        next_call = 0
        if on_layer is not None:
            for layer, end in enumerate(self._attended, first_layer):
                self._calls.run(next_call, end)
                on_layer(layer)
                next_call = end
        self._calls.run(next_call)
        return self._hidden[:rows]

    def _bind(self, layer: FusedLayer) -> None:
        attention, mlp = _bindable(layer)
        spec = attention.spec
        qkv = self._append_result(self._odd, attention.qkv, self._append_norm(layer.attention_norm))
        attended = _rows(self._even, spec.num_heads * spec.v_dim)
        heads = attended.view(MAX_ROWS, spec.num_heads, spec.v_dim)
        bound = self._attention.bind(spec, split_heads(qkv, spec), heads, attention.rotation)
        self._attentions.append(bound)
        self._list.append(bound.call)
        self._attended.append(len(self._list))
        self._append_sum(layer.output, attended, layer.attention_out_norm)
        gate_up = self._append_result(self._odd, mlp.gate_up, self._append_norm(layer.mlp_norm))
        product = _rows(self._even, mlp.down.in_features)
        self._append_call(mlp.product, gate_up, product)
        self._append_sum(mlp.down, product, layer.mlp_out_norm)

    def _append_norm(self, norm: RowNorm | None) -> torch.Tensor:
        """Return the hidden states, normed if there is a norm."""
        if norm is None:
            return self._hidden
        inner = _rows(self._even, self._hidden.shape[1])
        self._append_call(norm, self._hidden, inner)
        return inner

    def _append_sum(self, part: PackedLinear, x: torch.Tensor, norm: RowNorm | None) -> None:
        """Append the addition of ``norm(part(x))`` to the hidden states."""
        if norm is None:
            self._append_call(part, x, self._hidden, self._hidden)
        else:
            self._append_call(norm, self._append_result(self._odd, part, x), self._hidden, self._hidden)

    def _append_result(self, memory: torch.Tensor, part: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        out = _rows(memory, part.out_features)
        self._append_call(part, x, out)
        return out

    def _append_call(self, part: Any, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        bound = part.bind(x, out, residual) if isinstance(part, BindableOperator) else None
        if bound is None:
            raise UnboundError(f"{type(part).__name__} cannot be bound")
        self._list.append(bound)


def _bindable(layer: FusedLayer) -> tuple[HeadAttention, GatedMlp]:
    """Return the attention and the MLP of a layer whose parts can be bound."""
    if not isinstance(layer.attention, HeadAttention) or layer.attention.spanning_norms is not None:
        raise UnboundError("attention that is more than one operator")
    if not isinstance(layer.mlp, GatedMlp):
        raise UnboundError("a mixture of experts")
    return layer.attention, layer.mlp


def _widths(layer: FusedLayer) -> tuple[int, int]:
    """Return the widest results of a layer in each piece of memory: attention and products; QKV, gate and up."""
    attention, mlp = _bindable(layer)
    spec = attention.spec
    return max(spec.num_heads * spec.v_dim, mlp.down.in_features), max(
        attention.qkv.out_features, mlp.gate_up.out_features
    )


def _rows(memory: torch.Tensor, width: int) -> torch.Tensor:
    """Return the beginning of a piece of memory as rows of ``width``."""
    return memory[: MAX_ROWS * width].view(MAX_ROWS, width)
