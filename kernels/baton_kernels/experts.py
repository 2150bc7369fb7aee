"""Mixtures of experts: the choice of a token's experts (:class:`Routing`), and these experts' gated MLPs.

The C++ operator groups the rows by expert and multiplies each group with its expert's packed weights, so that a step
reads each weight that it needs once.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from baton_kernels.cpu.library import DTYPE_CODES, CpuLibrary, RowsCall, address
from baton_kernels.row_wise import Activation, gated_reference


class Scoring(enum.IntEnum):
    """How logits become scores; as ``csrc/routing.cpp`` numbers them."""

    SOFTMAX = 0
    """Softmax over all experts, then the choice of the best."""
    SOFTMAX_OF_CHOSEN = 1
    """The choice of the best, then softmax over them."""
    SIGMOID = 2
    """Sigmoid of each logit."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen.

    Attributes:
        top_k: Number of experts per token.
        scoring: How logits become scores.
        normalize: Whether the weights of a token are divided by their sum.
        scale: Factor of all weights, after they are normalized.
        groups: Number of groups of equal size that the experts are divided into.
        top_groups: Number of groups, the best ones, that a token's experts are chosen from.
        bias: float32 [experts], added to scores for the choice alone, or ``None``.
    """

    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    bias: torch.Tensor | None = None

    def check(self, experts: int) -> None:
        """Check that this routing fits a number of experts.

        Raises:
            ValueError: There are fewer experts than ``top_k``, or they cannot be divided into groups.
        """
        each, remainder = divmod(experts, self.groups)
        if remainder or self.top_groups > self.groups or self.top_k > each * self.top_groups:
            raise ValueError(f"{experts} experts do not fit {self}")


def routing_reference(routing: Routing, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts int32 [T, top_k] of logits [T, experts], best first, and their weights float32 [T, top_k]."""
    scores = logits.float()
    if routing.scoring is Scoring.SOFTMAX:
        scores = scores.softmax(-1)
    elif routing.scoring is Scoring.SIGMOID:
        scores = scores.sigmoid()
    choice = scores if routing.bias is None else scores + routing.bias
    if routing.groups > 1:
        grouped = choice.view(len(choice), routing.groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(routing.top_groups, dim=-1).indices
        chosen = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=logits.device).scatter(-1, best, value=True)
        choice = grouped.masked_fill(~chosen[..., None], float("-inf")).flatten(-2)
    ids = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if routing.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(-1)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.int(), weights * routing.scale


class RoutingCall(ctypes.Structure):
    """The C structure ``Routing`` of ``csrc/operators.h``."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_void_p) for name in ("logits", "bias", "ids", "weights")),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("experts", "top_k", "groups", "top_groups")),
        *((name, ctypes.c_int32) for name in ("dtype", "scoring", "normalize", "threads")),
        ("scale", ctypes.c_float),
    ]


class CpuRouting:
    """The C++ operator for one router.

    Raises:
        ValueError: There are fewer experts than ``top_k``, or they cannot be divided into groups.
    """

    def __init__(self, library: CpuLibrary, routing: Routing, experts: int) -> None:
        routing.check(experts)
        self._run = library.route
        self._top_k = routing.top_k
        self._experts = experts
        self._bias = None if routing.bias is None else routing.bias.detach().float().contiguous()
        self._call = RoutingCall(
            bias=address(self._bias),
            experts=experts,
            top_k=routing.top_k,
            groups=routing.groups,
            top_groups=routing.top_groups,
            scoring=routing.scoring,
            normalize=routing.normalize,
            scale=routing.scale,
        )

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return :func:`routing_reference` of contiguous logits [T, experts] in float32 or bfloat16."""
        tokens = len(logits)
        call = self._call
        ids = torch.empty(tokens, self._top_k, dtype=torch.int32)
        weights = torch.empty(tokens, self._top_k)
        call.logits = logits.data_ptr()
        call.ids = ids.data_ptr()
        call.weights = weights.data_ptr()
        call.tokens = tokens
        call.dtype = DTYPE_CODES[logits.dtype]
        call.threads = torch.get_num_threads()
        self._run(ctypes.byref(call))
        return ids, weights


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The gated MLPs of E experts.

    Attributes:
        gate_up: [E, 2 * inner, hidden], gates first.
        down: [E, hidden, inner].
        gate_up_bias: [E, 2 * inner], gates first, or ``None``.
        down_bias: [E, hidden], or ``None``.
        interleaved: Whether the weights are [E, hidden, 2 * inner] and [E, inner, hidden], with gates and ups
            alternating in ``gate_up`` and its bias (GPT-OSS).
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    interleaved: bool = False

    def expert(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one expert's gate_up [2 * inner, hidden], gates first, and down [hidden, inner], contiguous."""
        gate_up = self.gate_up[index].detach()
        down = self.down[index].detach()
        if self.interleaved:
            return torch.cat([gate_up[:, ::2].T, gate_up[:, 1::2].T]).contiguous(), down.T.contiguous()
        return gate_up.contiguous(), down.contiguous()

    def biases(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the biases float32 [E, 2, inner], gates first, and [E, hidden], or ``None``."""
        if self.gate_up_bias is None or self.down_bias is None:
            return None
        gate_up = self.gate_up_bias.detach().float()
        both = (
            torch.stack([gate_up[:, ::2], gate_up[:, 1::2]], 1)
            if self.interleaved
            else gate_up.view(len(gate_up), 2, -1)
        )
        return both, self.down_bias.detach().float()


def experts_reference(
    experts: ExpertWeights,
    activation: Activation,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' outputs [T, hidden], and ``residual``, in float64.

    Args:
        experts: The gated MLPs.
        activation: Activation between both products.
        x: Inputs [T, hidden].
        ids: Chosen experts [T, top_k]; an id below 0, or of E and above, chooses none.
        weights: Weights of the chosen experts [T, top_k].
        residual: Added to the result, [T, hidden], or ``None``.
    """
    out = torch.zeros(x.shape, dtype=torch.float64) if residual is None else residual.double()
    biases = experts.biases()
    for index in range(len(experts.gate_up)):
        gate_up, down = (part.double() for part in experts.expert(index))
        tokens, choices = torch.where(ids == index)
        inner = x[tokens].double() @ gate_up.T
        if biases is not None:
            inner = inner + biases[0][index].flatten()
        outputs = gated_reference(inner, activation) @ down.T
        if biases is not None:
            outputs = outputs + biases[1][index]
        out.index_add_(0, tokens, outputs * weights[tokens, choices, None].double())
    return out


class ExpertsCall(RowsCall):
    """The C structure ``Experts`` of ``csrc/operators.h``."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_void_p) for name in ("x", "ids", "weights", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("gate_up_bias", "down_bias", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("tokens", "x_stride", "residual_stride")),
        *((name, ctypes.c_int32) for name in ("top_k", "experts", "hidden", "inner")),
        *((name, ctypes.c_int32) for name in ("dtype", "activation", "pairs", "threads")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
    ]


class NativeExperts:
    """Base of the C++ operators for the experts of one layer.

    Attributes:
        hidden: Number of elements of a token.
    """

    hidden: int
    _run: Any
    """C function that takes the address of ``_call``."""
    _call: RowsCall

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return :func:`experts_reference` in x's dtype.

        Rows of x and residual may have any stride; ``ids`` int32 and ``weights`` float32 are contiguous.
        """
        out = x.new_empty(len(x), self.hidden)
        call = self._call
        call.set_tensors(x, out, residual)
        call.ids = ids.data_ptr()
        call.weights = weights.data_ptr()
        call.tokens = len(x)
        call.top_k = ids.shape[1]
        self._run(ctypes.byref(call))
        return out


class CpuExperts(NativeExperts):
    """The C++ operator for the experts of one layer, in float32 or bfloat16; sums in float32, rounded once.

    Raises:
        ValueError: The weights have another dtype.
    """

    def __init__(self, library: CpuLibrary, experts: ExpertWeights, activation: Activation) -> None:
        dtype = experts.gate_up.dtype
        if dtype not in {torch.float32, torch.bfloat16}:
            raise ValueError(f"weights must be float32 or bfloat16, got {dtype}")
        self._run = library.experts.run
        count = len(experts.gate_up)
        (double, hidden), _ = (part.shape for part in experts.expert(0))
        inner = double // 2
        code = DTYPE_CODES[dtype]
        sizes = (ctypes.c_int64 * 4)()
        library.experts.sizes(code, hidden, inner, sizes)
        gate_up_bytes, down_bytes, inner_columns, hidden_columns = sizes
        self._gate_up = library.weights.empty(count * gate_up_bytes, torch.uint8)
        self._down = library.weights.empty(count * down_bytes, torch.uint8)
        for index in range(count):
            gate_up, down = experts.expert(index)
            targets = (self._gate_up.data_ptr() + index * gate_up_bytes, self._down.data_ptr() + index * down_bytes)
            library.experts.pack(code, gate_up.data_ptr(), down.data_ptr(), *targets, hidden, inner)
        self._biases = [
            torch.nn.functional.pad(bias, (0, columns - bias.shape[-1])).contiguous()
            for bias, columns in zip(experts.biases() or (), (inner_columns, hidden_columns), strict=False)
        ]
        self.hidden = hidden
        self._call = ExpertsCall(
            gate_up=self._gate_up.data_ptr(),
            down=self._down.data_ptr(),
            gate_up_bias=self._biases[0].data_ptr() if self._biases else None,
            down_bias=self._biases[1].data_ptr() if self._biases else None,
            experts=count,
            hidden=hidden,
            inner=inner,
            dtype=code,
            activation=activation.kind,
            pairs=library.pairs_are_faster,
            alpha=activation.alpha,
            limit=activation.limit,
        )
