"""Mixtures of experts by Baton's operators, made from transformers' modules.

The fused decoder runs whole mixtures (:class:`Mixture`). On the generic path the experts alone are replaced
(:class:`PackedExperts`), which serves every family whose experts have the common layout, however it routes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from baton.engine.models.quirks import Family, has_interleaved_experts
from baton.engine.quantization.modules import QuantizedExpertsModule
from baton_kernels.cpu import CpuLibrary
from baton_kernels.experts import CpuExperts, ExpertWeights, Routing, Scoring
from baton_kernels.linear import PackedLinear, PlainLinear
from baton_kernels.quantization import ActivationScheme
from baton_kernels.quantized_experts import QuantizedExpertWeights, make_quantized_experts
from baton_kernels.row_wise import GELU_TANH, SILU, Activation, ActivationKind

log = logging.getLogger(__name__)

RunExperts = Callable[..., torch.Tensor]
"""Takes x, ids, weights and residual or ``None``; see :class:`baton_kernels.experts.CpuExperts`."""
Route = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Takes logits [T, experts], returns ids and weights [T, top_k]; ``baton_kernels.experts.routing_reference``."""
TwoSchemes = tuple[ActivationScheme, ActivationScheme]
"""How inputs of both products of experts are rounded."""
MakeQuantizedExperts = Callable[[QuantizedExpertWeights, Activation, TwoSchemes], RunExperts]
"""Makes the operator of quantized experts.

Raises:
    ValueError: It has none for them.
"""
CPU_DTYPES = {torch.float32, torch.bfloat16}
"""Of weights that the C++ operator takes."""


def gated_activation(module: nn.Module) -> Activation | None:
    """Return what a gated MLP, or a module of experts, does between its linears; ``None``: something else."""
    if has_interleaved_experts(module):
        found: Any = module
        return Activation(ActivationKind.CLIPPED_SWISH, float(found.alpha), float(found.limit))
    function: Any = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    if function is None:
        return None
    probe = torch.linspace(-4, 4, 33)
    got = function(probe)
    if torch.allclose(got, F.silu(probe), atol=1e-6):
        return SILU
    return GELU_TANH if torch.allclose(got, F.gelu(probe, approximate="tanh"), atol=1e-6) else None


def knows_experts(module: nn.Module) -> bool:
    """Whether a module is one of experts, gated MLPs, whose weights are laid out as the operators take them."""
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not isinstance(gate_up, nn.Parameter) or not isinstance(down, nn.Parameter) or gate_up.dim() != 3:
        return False
    interleaved = has_interleaved_experts(module)
    # As transformers' decorator of such modules notes them.
    layout = {"is_transposed": interleaved, "is_concatenated": not interleaved, "has_bias": interleaved}
    if any(getattr(module, name, None) is not value for name, value in layout.items()):
        return False
    if not getattr(module, "has_gate", False) or getattr(module, "has_post_expert_norm", True):
        return False
    return interleaved or gate_up.shape[1:] == (2 * down.shape[2], down.shape[1])


def expert_weights(module: nn.Module) -> ExpertWeights | None:
    """Return the weights of a module of experts as they lie; ``None``: it is none, or one of another layout."""
    if not knows_experts(module):
        return None
    experts: Any = module
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if has_interleaved_experts(module):
        return ExpertWeights(gate_up, down, experts.gate_up_proj_bias, experts.down_proj_bias, interleaved=True)
    return ExpertWeights(gate_up, down)


class ExpertsByDefinition:
    """Quantized experts as their module computes them."""

    def __init__(self, module: QuantizedExpertsModule) -> None:
        self._module = module

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`baton_kernels.experts.CpuExperts`."""
        out: torch.Tensor = self._module(x, ids, weights)
        return out if residual is None else out.add_(residual)


def pack_quantized_experts(module: QuantizedExpertsModule, make: MakeQuantizedExperts) -> RunExperts:
    """Return the operator of quantized experts, which from then on keep no weights of their own."""
    biases = module.biases()
    gate_up_bias, down_bias = (None, None) if biases is None else (biases[0].flatten(1), biases[1])
    parts = ([held.get() for held in module.gate_up], [held.get() for held in module.down])
    try:
        weights = QuantizedExpertWeights(*parts, gate_up_bias, down_bias)
        made = make(weights, module.activation, module.activations)
    except ValueError as error:
        log.warning("quantized experts run by their definition, slowly: %s", error)
        return ExpertsByDefinition(module)
    for held in module.weights:
        held.release()
    return made


def pack_experts(module: nn.Module, library: CpuLibrary) -> RunExperts | None:
    """Return the C++ operator for a module of experts; ``None``: it is none that the operator can run."""
    if isinstance(module, QuantizedExpertsModule):
        return pack_quantized_experts(module, partial(_cpu_quantized_experts, library))
    weights, activation = expert_weights(module), gated_activation(module)
    if weights is None or activation is None or weights.gate_up.dtype not in CPU_DTYPES:
        return None
    return CpuExperts(library, weights, activation)


def _cpu_quantized_experts(
    library: CpuLibrary, weights: QuantizedExpertWeights, activation: Activation, activations: TwoSchemes
) -> RunExperts:
    first, second = activations
    if first != second:
        raise ValueError("inputs of both products are rounded in different ways")
    return make_quantized_experts(library, weights, activation, first)


class PackedExperts(nn.Module):
    """Stands in for a module of experts; has no weights, so that code which looks for them fails loudly."""

    def __init__(self, experts: RunExperts) -> None:
        super().__init__()
        self._experts = experts

    def forward(self, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Take hidden_states [T, hidden], ids and weights [T, top_k], return [T, hidden]."""
        return self._experts(hidden_states, ids.int().contiguous(), weights.float().contiguous())


class Mixture:
    """A whole mixture of experts: router, experts, and a gated MLP that all tokens go through, if there is one."""

    def __init__(
        self, router: PackedLinear, routing: Route, experts: RunExperts, shared: Any, *, wide_router: bool
    ) -> None:
        self._router, self._routing, self._experts, self._shared = router, routing, experts, shared
        self._wide_router = wide_router

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Take x and residual [T, hidden], return [T, hidden]."""
        ids, weights = self._routing(self._router(x.float() if self._wide_router else x))
        if self._shared is not None:
            residual = self._shared(x, residual)
        return self._experts(x, ids, weights, residual)


def make_mixture(
    router: Any,
    experts: RunExperts,
    shared: Any,
    family: Family,
    make_routing: Callable[[Routing, int], Route],
    make: Callable[[torch.Tensor, torch.Tensor | None], PackedLinear],
) -> Mixture:
    """Put a mixture together.

    Args:
        router: transformers' module.
        experts: Of this rank.
        shared: Takes x and residual, or ``None``.
        family: Says how the router chooses.
        make_routing: Makes the operator of a router for so many experts.
        make: Makes a linear layer of weight and bias.

    Raises:
        ValueError: The router's numbers contradict each other.
    """
    weight, bias = router.weight.detach(), getattr(router, "bias", None)
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
    linear = PlainLinear(weight.float(), bias) if wide else make(weight, None if bias is None else bias.detach())
    return Mixture(linear, make_routing(routing, len(weight)), experts, shared, wide_router=wide)
