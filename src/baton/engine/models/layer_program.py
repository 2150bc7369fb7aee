"""The layers of a fused decoder as one list of calls into the C++ operators, bound to memory of their own.

Run operator by operator, a layer costs 70 µs of Python beside its work, and gives the interpreter's lock back and takes
it again eight times, each time behind whoever else wants it. As a list, all layers of a step cost what one call does.
It is for layers that consist of nothing but such calls: head-wise attention and a gated MLP, plain or quantized, on one
rank; and for steps of up to 256 tokens, beyond which the operators' own work is all that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from baton.engine.models.fused_layers import FusedLayer, GatedMlp, HeadAttention, split_heads
from baton.engine.models.layer_operators import RowNorm
from baton_kernels.cpu.library import BindableOperator, BoundCall, NativeCalls
from baton_kernels.linear import PackedLinear
from baton_kernels.paged_attention import LayerPool
from baton_kernels.paged_attention.cpu import BoundAttention, CpuPagedAttention, CpuPlan

MOST_ROWS = 256
"""Tokens of a step; memory for so many is kept."""


class UnboundError(Exception):
    """A layer has a part that cannot be bound; says which."""


class LayerProgram:
    """The layers' calls. Not thread-safe, and each run overwrites what the one before returned.

    Args:
        layers: In their order.
        attention: The operator that attends.
        width: Of the hidden states.
        dtype: Theirs.

    Raises:
        UnboundError: A layer has a part that cannot be bound.
    """

    def __init__(
        self, layers: Sequence[FusedLayer], attention: CpuPagedAttention, width: int, dtype: torch.dtype
    ) -> None:
        self._attention = attention
        self._hidden = torch.empty(MOST_ROWS, width, dtype=dtype)
        # What each operator writes the next one reads, and nobody after it: two pieces of memory do.
        sizes = (MOST_ROWS * max(width, *each) for each in zip(*map(_widths, layers), strict=True))
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
        """Run all layers over hidden states [T, width], T at most ``MOST_ROWS``.

        Args:
            hidden: Is not changed.
            plan: What the attention operator prepared.
            pools: By layer.
            on_layer: Called with a layer's number as soon as its KV is in its pool; or ``None``.
            first_layer: The first one's number.

        Returns:
            Hidden states [T, width] in memory that the next run overwrites.
        """
        rows = len(hidden)
        self._hidden[:rows].copy_(hidden)
        self._calls.resize(rows, torch.get_num_threads())
        for bound, pool in zip(self._attentions, pools, strict=True):
            bound.attend(plan, pool)
        done = 0
        if on_layer is not None:
            for layer, end in enumerate(self._attended, first_layer):
                self._calls.run(done, end)
                on_layer(layer)
                done = end
        self._calls.run(done)
        return self._hidden[:rows]

    def _bind(self, layer: FusedLayer) -> None:
        attention, mlp = _bindable(layer)
        spec = attention.spec
        qkv = self._made(self._odd, attention.qkv, self._normed(layer.attention_norm))
        attended = _rows(self._even, spec.num_heads * spec.v_dim)
        heads = attended.view(MOST_ROWS, spec.num_heads, spec.v_dim)
        bound = self._attention.bind(spec, split_heads(qkv, spec), heads, attention.rotation)
        self._attentions.append(bound)
        self._list.append(bound.call)
        self._attended.append(len(self._list))
        self._add(layer.output, attended, layer.attention_out_norm)
        gate_up = self._made(self._odd, mlp.gate_up, self._normed(layer.mlp_norm))
        product = _rows(self._even, mlp.down.in_features)
        self._call(mlp.product, gate_up, product)
        self._add(mlp.down, product, layer.mlp_out_norm)

    def _normed(self, norm: RowNorm | None) -> torch.Tensor:
        """The hidden states, normed if there is a norm."""
        if norm is None:
            return self._hidden
        inner = _rows(self._even, self._hidden.shape[1])
        self._call(norm, self._hidden, inner)
        return inner

    def _add(self, part: PackedLinear, x: torch.Tensor, norm: RowNorm | None) -> None:
        """Add ``norm(part(x))`` to the hidden states."""
        if norm is None:
            self._call(part, x, self._hidden, self._hidden)
        else:
            self._call(norm, self._made(self._odd, part, x), self._hidden, self._hidden)

    def _made(self, memory: torch.Tensor, part: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        out = _rows(memory, part.out_features)
        self._call(part, x, out)
        return out

    def _call(self, part: Any, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        bound = part.bind(x, out, residual) if isinstance(part, BindableOperator) else None
        if bound is None:
            raise UnboundError(f"{type(part).__name__} cannot be bound")
        self._list.append(bound)


def _bindable(layer: FusedLayer) -> tuple[HeadAttention, GatedMlp]:
    """The parts of a layer that is of the known kind."""
    if not isinstance(layer.attention, HeadAttention) or layer.attention.spanning_norms is not None:
        raise UnboundError("attention that is more than one operator")
    if not isinstance(layer.mlp, GatedMlp):
        raise UnboundError("a mixture of experts")
    return layer.attention, layer.mlp


def _widths(layer: FusedLayer) -> tuple[int, int]:
    """Of the widest results in a layer of every other operator: queries' outputs and products, and what they are of."""
    attention, mlp = _bindable(layer)
    spec = attention.spec
    return max(spec.num_heads * spec.v_dim, mlp.down.in_features), max(
        attention.qkv.out_features, mlp.gate_up.out_features
    )


def _rows(memory: torch.Tensor, width: int) -> torch.Tensor:
    """The first part of some memory as rows."""
    return memory[: MOST_ROWS * width].view(MOST_ROWS, width)
