"""Chooses how linear layers are computed, and swaps a model's own for packed ones."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from baton.config import EngineConfig
from baton.engine.models.loader import LoadedModel
from baton_kernels.cpu import CpuLibrary
from baton_kernels.linear import AmxLinear, CpuLinear, OneDnnLinear, PackedLinear, PlainLinear

log = logging.getLogger(__name__)

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], PackedLinear]
"""Makes a layer of weight [out, in] and bias [out] or ``None``."""


def choose_linear(config: EngineConfig, model: LoadedModel, library: CpuLibrary | None) -> tuple[str, MakeLinear]:
    """Return the name and the maker of the linear layers that are fastest for a model's dtype on this machine.

    bfloat16 on a CPU: the C++ operator for AMX where that is; oneDNN where the processor multiplies bfloat16 fast (AMX
    without these operators, or a full-rate vdpbf16ps); else the C++ operator that multiplies in float32. Anything else:
    torch's own.
    """
    if model.device.type != "cpu" or model.dtype != "bfloat16" or not config.packed_linears:
        return "torch", PlainLinear
    if library is not None and library.amx:
        return "amx", lambda weight, bias: AmxLinear(library, weight, bias)
    fast_bf16 = torch.cpu._is_amx_tile_supported() or (library is not None and library.pairs_are_faster)
    if library is not None and not fast_bf16:
        return "cpp", lambda weight, bias: CpuLinear(library, weight, bias)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "onednn", OneDnnLinear
    return "torch", PlainLinear


class PackedModule(nn.Module):
    """Stands in for an ``nn.Linear``; has no ``weight``, so that code which looks for one fails loudly."""

    def __init__(self, linear: PackedLinear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take x [..., in_features], return [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        return self._linear(rows).view(*x.shape[:-1], self.out_features)


def pack_modules(module: nn.Module, make: MakeLinear) -> dict[str, nn.Module]:
    """Replace every plain ``nn.Linear`` below a module by a packed one; a tied head gets a packed copy of its own.

    Returns:
        The replaced modules by their names, for :func:`restore_modules`.
    """
    replaced: dict[str, nn.Module] = {}
    for name, child in list(module.named_modules()):
        if type(child) is nn.Linear and name:
            replaced[name] = child
            module.set_submodule(name, PackedModule(make(child.weight, child.bias)))
    return replaced


def restore_modules(module: nn.Module, replaced: dict[str, nn.Module]) -> None:
    """Undo :func:`pack_modules`."""
    for name, child in replaced.items():
        module.set_submodule(name, child)
