"""The quantized operators' way through AMX's tiles, the tiles emulated: few machines that run tests have them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.models.quantized import FORMS, make

from baton_kernels.cpu import library as cpu
from baton_kernels.quantization import EXACT, INT8_PER_TOKEN
from baton_kernels.quantized_experts import CpuQuantizedExperts, QuantizedExpertWeights, quantized_experts_reference
from baton_kernels.quantized_linear import CpuQuantizedLinear, quantized_linear_reference
from baton_kernels.row_wise import SILU

SOURCES = Path(cpu.__file__).with_name("csrc")
HEADER = Path(__file__).with_name("amx_emulation.h")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no compiler")
    target = tmp_path_factory.mktemp("amx") / "emulated.so"
    sources = sorted((SOURCES / "quantized").glob("*.cpp"))
    flags = ["-std=gnu++17", "-O1", "-w", "-fPIC", "-shared", f'-DBATON_AMX_EMULATION="{HEADER}"', f"-I{SOURCES}"]
    subprocess.run([compiler, *flags, *sources, "-o", target], check=True)
    ctypes.CDLL(cpu.openmp_runtime(), mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(target))
    operators = cpu.QuantizedOperators.look_up(loaded)
    return SimpleNamespace(
        quantized=operators,
        weights=cpu.WeightMemory(),
        amx=True,
        pairs_are_faster=False,
        instructions="emulated",
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", [8, 16, 64, 96, 384])
def test_linear_layers(emulated: Any, form: str, group: int) -> None:
    random = torch.Generator().manual_seed(group)
    weight = make(form, 70, 384 if group != 64 else 1280, group)
    for rows in (16, 17, 40, 330):
        x = torch.randn(rows, weight.columns, generator=random).bfloat16()
        exact = quantized_linear_reference(x, weight)
        got = CpuQuantizedLinear(emulated, weight)(x)
        assert (got - exact).float().norm() / exact.float().norm() < 5e-3  # weights are rounded to bfloat16
        if form.startswith("int"):
            want = quantized_linear_reference(x, weight, activations=INT8_PER_TOKEN)
            got = CpuQuantizedLinear(emulated, weight, None, INT8_PER_TOKEN)(x)
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2 * float(want.abs().max()))
            assert (got == want).float().mean() > 0.95


@pytest.mark.parametrize("form", FORMS)
def test_experts(emulated: Any, form: str) -> None:
    random = torch.Generator().manual_seed(1)
    experts = QuantizedExpertWeights(
        [make(form, 96, 64, 32, s) for s in range(3)], [make(form, 64, 48, 16, s) for s in range(3)]
    )
    ids = torch.stack([torch.randperm(3, generator=random)[:2] for _ in range(150)]).int()
    x, weights = torch.randn(150, 64, generator=random).bfloat16() * 0.1, torch.rand(150, 2, generator=random)
    schemes = [EXACT, INT8_PER_TOKEN] if form.startswith("int") else [EXACT]
    for scheme in schemes:
        want = quantized_experts_reference(experts, SILU, x, ids, weights, activations=scheme)
        got = CpuQuantizedExperts(emulated, experts, SILU, scheme)(x, ids, weights)
        assert (got.double() - want).norm() / want.norm() < 1e-2
