"""What a model's layers are made of where it runs: C++ operators on a CPU, Triton's on a GPU, under one interface.

The fused decoder runs whole mixtures of experts (:class:`Mixture`). On the generic path the experts alone are replaced
(:class:`PackedExperts`), which serves every family whose experts have the common layout, however it routes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from baton.engine.models.quirks import Family, has_interleaved_experts
from baton.engine.quantization.modules import QuantizedExpertsModule, QuantizedModule
from baton_kernels.cpu import CpuLibrary
from baton_kernels.experts import CpuExperts, CpuRouting, ExpertWeights, Routing, Scoring, routing_reference
from baton_kernels.linear import PackedLinear, PlainLinear
from baton_kernels.quantization import ActivationScheme, QuantizedWeight, join_weights
from baton_kernels.quantized_experts import QuantizedExpertWeights, make_quantized_experts
from baton_kernels.quantized_linear import make_quantized_linear
from baton_kernels.row_wise import GELU_TANH, SILU, Activation, ActivationKind, CpuGatedMul, CpuRmsNorm

log = logging.getLogger(__name__)

RunExperts = Callable[..., torch.Tensor]
"""Runs experts: (x, ids, weights, residual or ``None``); see :class:`baton_kernels.experts.CpuExperts`."""
Route = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Chooses experts: logits [T, experts] -> ids and weights [T, top_k]; see :func:`.routing_reference`."""
TwoSchemes = tuple[ActivationScheme, ActivationScheme]
"""How inputs of the first and of the second product of experts are rounded."""
MakeQuantizedExperts = Callable[[QuantizedExpertWeights, Activation, TwoSchemes], RunExperts]
"""Makes the operator of quantized experts; raises :class:`ValueError` where there is none for them."""
CPU_DTYPES = {torch.float32, torch.bfloat16}
"""Dtypes of experts' weights that the C++ operator supports."""


def gated_activation(module: nn.Module) -> Activation | None:
    """Return the activation of a gated MLP or a module of experts; ``None``: it is none that the operators know."""
    if has_interleaved_experts(module):
        experts: Any = module
        return Activation(ActivationKind.CLIPPED_SWISH, float(experts.alpha), float(experts.limit))
    function: Any = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    if function is None:
        return None
    probe = torch.linspace(-4, 4, 33)
    output = function(probe)
    if torch.allclose(output, F.silu(probe), atol=1e-6):
        return SILU
    return GELU_TANH if torch.allclose(output, F.gelu(probe, approximate="tanh"), atol=1e-6) else None


def knows_experts(module: nn.Module) -> bool:
    """Whether a module has experts, gated MLPs, whose weights have the layout of the operators."""
    gate_up = getattr(module, "gate_up_proj", None)
    down = getattr(module, "down_proj", None)
    if not isinstance(gate_up, nn.Parameter) or not isinstance(down, nn.Parameter) or gate_up.dim() != 3:
        return False
    interleaved = has_interleaved_experts(module)
    # Attributes that transformers' decorator of such modules sets.
    layout = {"is_transposed": interleaved, "is_concatenated": not interleaved, "has_bias": interleaved}
    if any(getattr(module, name, None) is not value for name, value in layout.items()):
        return False
    if not getattr(module, "has_gate", False) or getattr(module, "has_post_expert_norm", True):
        return False
    return interleaved or gate_up.shape[1:] == (2 * down.shape[2], down.shape[1])


def expert_weights(module: nn.Module) -> ExpertWeights | None:
    """Return the weights of a module of experts, without copies; ``None``: it has none, or of another layout."""
    if not knows_experts(module):
        return None
    experts: Any = module
    gate_up = experts.gate_up_proj
    down = experts.down_proj
    if has_interleaved_experts(module):
        return ExpertWeights(gate_up, down, experts.gate_up_proj_bias, experts.down_proj_bias, interleaved=True)
    return ExpertWeights(gate_up, down)


def _run_module(
    module: QuantizedExpertsModule,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    out: torch.Tensor = module(x, ids, weights)
    return out if residual is None else out.add_(residual)


def pack_quantized_experts(module: QuantizedExpertsModule, make: MakeQuantizedExperts) -> RunExperts:
    """Return the operator of quantized experts; the module's weights are dropped from memory."""
    biases = module.biases()
    gate_up_bias, down_bias = (None, None) if biases is None else (biases[0].flatten(1), biases[1])
    gate_up = [weight.get() for weight in module.gate_up]
    down = [weight.get() for weight in module.down]
    try:
        weights = QuantizedExpertWeights(gate_up, down, gate_up_bias, down_bias)
        run_experts = make(weights, module.activation, module.activations)
    except ValueError as error:
        log.warning("quantized experts run by their definition, slowly: %s", error)
        return partial(_run_module, module)
    for weight in module.weights:
        weight.release()
    return run_experts


def _cpu_quantized_experts(
    library: CpuLibrary, weights: QuantizedExpertWeights, activation: Activation, activations: TwoSchemes
) -> RunExperts:
    first, second = activations
    if first != second:
        raise ValueError("inputs of both products are rounded in different ways")
    return make_quantized_experts(library, weights, activation, first)


class PackedExperts(nn.Module):
    """Replaces a module of experts; has no weights, so that code which looks for them fails loudly."""

    def __init__(self, experts: RunExperts) -> None:
        super().__init__()
        self._experts = experts

    def forward(self, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum [T, hidden] of the experts ``ids`` [T, top_k] for hidden_states [T, hidden]."""
        return self._experts(hidden_states, ids.int().contiguous(), weights.float().contiguous())


@dataclass(frozen=True, slots=True)
class Mixture:
    """A whole mixture of experts: router, experts, and a shared gated MLP for all tokens, if there is one.

    Attributes:
        router: Linear layer of the router.
        routing: Chooses experts from the router's logits.
        experts: Runs the experts.
        shared: Shared MLP (x, residual), or ``None``.
        wide_router: Whether the router computes in float32.
    """

    router: PackedLinear
    routing: Route
    experts: RunExperts
    shared: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None
    wide_router: bool

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output, plus the residual, [T, hidden] for x and residual [T, hidden]."""
        ids, weights = self.routing(self.router(x.float() if self.wide_router else x))
        if self.shared is not None:
            residual = self.shared(x, residual)
        return self.experts(x, ids, weights, residual)


def make_mixture(
    router: Any,
    experts: RunExperts,
    shared: Any,
    family: Family,
    operators: LayerOperators,
) -> Mixture:
    """Return a mixture of experts.

    Args:
        router: transformers' router module.
        experts: Operator of this rank's experts.
        shared: Shared MLP (x, residual), or ``None``.
        family: The model's family, with the way that its router chooses experts.
        operators: Makes the operators of router and routing.

    Raises:
        ValueError: The router's numbers contradict each other.
    """
    weight = router.weight.detach()
    bias = getattr(router, "bias", None)
    wide = family.scoring is Scoring.SIGMOID
    routing = Routing(
        top_k=int(router.top_k),
        scoring=family.scoring,
        normalize=bool(router.norm_topk_prob if family.normalizes is None else family.normalizes),
        scale=float(getattr(router, "routed_scaling_factor", 1.0)),
        groups=int(getattr(router, "num_group", 1)),
        top_groups=int(getattr(router, "topk_group", 1)),
        bias=getattr(router, "e_score_correction_bias", None),
    )
    make_linear = PlainLinear if wide else operators.linear
    linear = make_linear(weight.float() if wide else weight, None if bias is None else bias.detach())
    return Mixture(linear, operators.routing(routing, len(weight)), experts, shared, wide_router=wide)


# Operators of a device


MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], PackedLinear]
"""Makes a linear layer: (weight [out, in], bias [out] or ``None``)."""
GatedProduct = Callable[[torch.Tensor], torch.Tensor]
"""Gated product: [rows, 2 dim], gates first -> [rows, dim]; see :func:`baton_kernels.row_wise.gated_reference`."""


class RowNorm(Protocol):
    """An RMS norm of rows."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of x [rows, dim], rows of any stride, plus a contiguous residual, contiguous [rows, dim]."""


class LayerOperators(Protocol):
    """Makes operators of weights.

    Attributes:
        linear: Makes linear layers.
        quantized: Name, for logs, of the operators for packed quantized weights; empty: there are none, layers are
            computed by their definition.
    """

    linear: MakeLinear
    quantized: str

    def quantized_linear(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, activations: ActivationScheme
    ) -> PackedLinear:
        """Make a layer of a quantized weight [out, in], bias [out] or ``None``, and how inputs are rounded."""

    def rms_norm(self, weight: torch.Tensor, eps: float, offset: float) -> RowNorm:
        """Make an RMS norm of a weight [dim] in the model's dtype."""

    def gated_product(self, dtype: torch.dtype, activation: Activation) -> GatedProduct:
        """Make the product between the linears of a gated MLP."""

    def routing(self, routing: Routing, experts: int) -> Route:
        """Make the operator of a router.

        Raises:
            ValueError: Its numbers contradict each other.
        """

    def takes_experts(self, module: nn.Module) -> bool:
        """Whether :meth:`experts` supports a module of plain experts."""

    def experts(self, module: nn.Module) -> RunExperts | None:
        """Make the operator of a module of experts; ``None``: there is none for this module."""


class CpuOperators:
    """Operators of a CPU.

    Args:
        library: The C++ operators, which the fused decoder needs; ``None``: they cannot be loaded.
        linear: Makes linear layers.
    """

    def __init__(self, library: CpuLibrary | None, linear: MakeLinear) -> None:
        self._library = library
        self.linear = linear
        self.quantized = "" if library is None else library.instructions

    def quantized_linear(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, activations: ActivationScheme
    ) -> PackedLinear:
        return make_quantized_linear(self._library, weight, bias, activations)

    def rms_norm(self, weight: torch.Tensor, eps: float, offset: float) -> RowNorm:
        return CpuRmsNorm(self._required, weight, eps, offset)

    def gated_product(self, dtype: torch.dtype, activation: Activation) -> GatedProduct:
        return CpuGatedMul(self._required, dtype, activation)

    def routing(self, routing: Routing, experts: int) -> Route:
        return CpuRouting(self._required, routing, experts)

    def takes_experts(self, module: nn.Module) -> bool:
        weights = None if self._library is None else expert_weights(module)
        return weights is not None and weights.gate_up.dtype in CPU_DTYPES

    def experts(self, module: nn.Module) -> RunExperts | None:
        if self._library is None:
            return None
        if isinstance(module, QuantizedExpertsModule):
            return pack_quantized_experts(module, partial(_cpu_quantized_experts, self._library))
        weights = expert_weights(module)
        activation = gated_activation(module)
        if weights is None or activation is None or weights.gate_up.dtype not in CPU_DTYPES:
            return None
        return CpuExperts(self._library, weights, activation)

    @property
    def _required(self) -> CpuLibrary:
        if self._library is None:
            raise ValueError("no C++ operators")
        return self._library


class GpuOperators:
    """Operators of a GPU, or of Triton's interpreter. Weights are not copied; torch multiplies by plain ones."""

    def __init__(self) -> None:
        self.linear: MakeLinear = PlainLinear
        self.quantized = "triton"

    def quantized_linear(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, activations: ActivationScheme
    ) -> PackedLinear:
        from baton_kernels.gpu.quantized_linear import TritonEightBitLinear, TritonQuantizedLinear, takes_eight_bits

        if takes_eight_bits(weight, activations):
            return TritonEightBitLinear(weight, bias, activations)
        return TritonQuantizedLinear(weight, bias, activations)

    def rms_norm(self, weight: torch.Tensor, eps: float, offset: float) -> RowNorm:
        from baton_kernels.gpu.row_wise import TritonRmsNorm

        return TritonRmsNorm(weight, eps, offset)

    def gated_product(self, dtype: torch.dtype, activation: Activation) -> GatedProduct:
        from baton_kernels.gpu.row_wise import TritonGatedMul

        return TritonGatedMul(activation)

    def routing(self, routing: Routing, experts: int) -> Route:
        routing.check(experts)
        return partial(routing_reference, routing)  # torch's operators, none of which waits for the device

    def takes_experts(self, module: nn.Module) -> bool:
        return expert_weights(module) is not None and gated_activation(module) is not None

    def experts(self, module: nn.Module) -> RunExperts | None:
        from baton_kernels.gpu.experts import TritonExperts
        from baton_kernels.gpu.quantized_experts import TritonQuantizedExperts

        if isinstance(module, QuantizedExpertsModule):
            return pack_quantized_experts(module, TritonQuantizedExperts)
        weights = expert_weights(module)
        activation = gated_activation(module)
        return None if weights is None or activation is None else TritonExperts(weights, activation)


class SideBySide:
    """Linear layers of one input that cannot be joined: their outputs are concatenated."""

    def __init__(self, parts: list[PackedLinear]) -> None:
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)
        self._parts = parts

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.cat([part(x) for part in self._parts], dim=1)
        return out if residual is None else out.add_(residual)


def join_quantized(modules: list[nn.Module], operators: LayerOperators) -> PackedLinear | None:
    """Return one operator for quantized layers of one input; ``None``: they are quantized differently."""
    quantized = [module for module in modules if isinstance(module, QuantizedModule)]
    biases: list[torch.Tensor] = [module.bias for module in quantized if module.bias is not None]
    activations = quantized[0].activations
    if len(quantized) != len(modules) or len(biases) not in {0, len(modules)}:
        return None
    if any(module.activations != activations for module in quantized):
        return None
    try:
        weight = join_weights([module.reloadable.get() for module in quantized])
    except ValueError as error:
        log.info("quantized layers stay apart: %s", error)
        return None
    for module in quantized:
        module.reloadable.release()
    return operators.quantized_linear(weight, torch.cat(biases) if biases else None, activations)


def pack_quantized(module: QuantizedModule, operators: LayerOperators) -> PackedLinear:
    """Return the operator of a quantized layer; the module's weight is dropped from memory."""
    packed = operators.quantized_linear(module.reloadable.get(), module.bias, module.activations)
    module.reloadable.release()
    return packed
