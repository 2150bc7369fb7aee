"""The quantized operators compiled for 64-bit Arm and run by QEMU, where a cross compiler and QEMU are installed.

``apt-get install g++-aarch64-linux-gnu qemu-user-static``
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.models.quantized import FORMS, make

from baton_kernels.cpu import library as cpu
from baton_kernels.cpu.variants import VARIANTS, Variant
from baton_kernels.quantization import EXACT, INT8_PER_TOKEN, ActivationScheme, ActivationType
from baton_kernels.quantized_experts import CpuQuantizedExperts, QuantizedExpertWeights, quantized_experts_reference
from baton_kernels.quantized_linear import CpuQuantizedLinear, quantized_linear_reference
from baton_kernels.row_wise import SILU

COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
SOURCES = Path(cpu.__file__).with_name("csrc")
CALLS = Path(__file__).with_name("arm_calls.cpp")
SCHEMES = {"exact": EXACT, "int8": INT8_PER_TOKEN, "int8-static": ActivationScheme(ActivationType.INT8, 0.03)}
WIDTHS = {0: 4, 1: 2, 2: 2}
"""Bytes of an element, by the C interface's code of its type."""

pytestmark = pytest.mark.skipif(COMPILER is None or EMULATOR is None, reason="no cross compiler for Arm, or no QEMU")

Piece = tuple[int, int]
"""Address and bytes of memory here."""


class Emulated:
    """A build's functions as ctypes would have them; what they are given is copied to QEMU's process and back."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.quantized = SimpleNamespace(
            packed_size=self._packed_size, pack=self._pack, run=self._linear, experts=self._experts
        )
        self.weights, self.instructions = cpu.WeightMemory(), "emulated"
        self.amx = self.pairs_are_faster = False

    def _call(self, name: str, arguments: list[Piece | None], pointers: dict[int, Piece] | None = None) -> int:
        """Call a function; the last piece is copied back.

        Args:
            name: As ``arm_calls.cpp`` has it.
            arguments: What it is given addresses of; a structure first.
            pointers: By offsets in the structure, what it has addresses of.
        """
        found, inside = [each for each in arguments if each is not None], pointers or {}
        pieces = [*found, *inside.values()]
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(struct.pack("<64sq", name.encode(), len(pieces)))
        for at, size in pieces:
            stdin.write(struct.pack("<q", size) + ctypes.string_at(at, size))
        places = iter(range(len(found)))
        indices = [-1 if each is None else next(places) for each in arguments]
        stdin.write(struct.pack("<5q", *(indices + [-1] * 5)[:5]))
        stdin.write(struct.pack("<q", len(inside)))
        for index, offset in enumerate(inside):
            stdin.write(struct.pack("<3q", 0, offset, len(found) + index))
        stdin.flush()
        answer = stdout.read(8 + sum(size for _, size in pieces))
        at, size = pieces[-1]
        ctypes.memmove(at, answer[len(answer) - size :], size)
        return int.from_bytes(answer[:8], "little", signed=True)

    def _packed_size(self, at: Any) -> int:
        return self._call("packed_size", [structure(at._obj)])

    def _pack(self, at: Any, values: int, scales: int, zeros: int | None, to: int) -> None:
        shape = at._obj
        columns = shape.in_features if shape.form in {0, 2} else shape.in_features // 2
        numbers = 4 * shape.out_features * -(-shape.in_features // shape.group)
        given = [
            structure(shape),
            (values, shape.out_features * columns),
            (scales, numbers),
            None if zeros is None else (zeros, numbers),
            (to, self._packed_size(at)),
        ]
        self._call("pack", given)

    def _linear(self, at: Any) -> None:
        call, width = at._obj, WIDTHS[at._obj.dtype]
        call.threads = 1
        shape = call.shape
        sizes = {
            "x": call.rows * call.x_stride * width,
            "packed": self._packed_size(ctypes.byref(shape)),
            "table": 64,
            "bias": 4 * shape.out_features,
            "order": 4 * shape.in_features,
            "residual": call.rows * call.residual_stride * width,
            "out": call.rows * call.out_stride * width,
        }
        self._call("linear", [structure(call)], addresses(call, sizes))

    def _experts(self, at: Any) -> None:
        call, width = at._obj, WIDTHS[at._obj.dtype]
        call.threads = 1
        gate_up, down = call.gate_up, call.down
        chosen = 4 * call.tokens * call.top_k
        sizes = {
            "x": call.tokens * call.x_stride * width,
            "ids": chosen,
            "weights": chosen,
            "packed_gate_up": call.experts * self._packed_size(ctypes.byref(gate_up)),
            "packed_down": call.experts * self._packed_size(ctypes.byref(down)),
            "gate_up_table": 64,
            "down_table": 64,
            "gate_up_order": 4 * gate_up.in_features,
            "down_order": 4 * down.in_features,
            "gate_up_bias": 4 * call.experts * gate_up.out_features,
            "down_bias": 4 * call.experts * down.out_features,
            "residual": call.tokens * call.residual_stride * width,
            "out": call.tokens * down.out_features * width,
        }
        self._call("experts", [structure(call)], addresses(call, sizes))


def structure(value: ctypes.Structure) -> Piece:
    """A structure's memory."""
    return ctypes.addressof(value), ctypes.sizeof(value)


def addresses(call: Any, sizes: dict[str, int]) -> dict[int, Piece]:
    """What a structure's fields point to, by their offsets."""
    present = {name: getattr(call, name) for name in sizes}
    return {getattr(type(call), name).offset: (at, sizes[name]) for name, at in present.items() if at is not None}


@pytest.fixture(scope="module", params=VARIANTS["aarch64"], ids=lambda variant: variant.name)
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    variant: Variant = request.param
    target = tmp_path_factory.mktemp("arm") / "calls"
    sources = [CALLS, *sorted((SOURCES / "quantized").glob("*.cpp"))]
    march = "-march=" + "+".join((variant.march, *variant.features))
    flags = ["-std=gnu++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-static", march, f"-I{SOURCES}"]
    assert COMPILER is not None
    assert EMULATOR is not None
    subprocess.run([COMPILER, *flags, *sources, "-o", target], check=True)
    process = subprocess.Popen([EMULATOR, target], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Emulated(process)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("form", FORMS)
def test_linear_layers(emulated: Any, form: str, scheme: str) -> None:
    random = torch.Generator().manual_seed(1)
    for columns, group in ((384, 32), (200, 200)):
        weight = make(form, 70, columns, group)
        bias = torch.randn(70, generator=random)
        layer = CpuQuantizedLinear(emulated, weight, bias, SCHEMES[scheme])
        for rows in (1, 2, 6, 13, 17):
            x, residual = (torch.randn(rows, width, generator=random) for width in (columns, 70))
            want = quantized_linear_reference(x, weight, bias, residual, SCHEMES[scheme])
            got = layer(x, residual)
            torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6 * float(want.abs().max() + 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_narrow_inputs(emulated: Any, form: str, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(2)
    weight = make(form, 50, 256, 64)
    x = torch.randn(9, 256, generator=random).to(dtype)
    got, want = CpuQuantizedLinear(emulated, weight)(x), quantized_linear_reference(x, weight)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert (got == want).float().mean() > 0.95  # rounded once: nearly always to the same value


@pytest.mark.parametrize("form", FORMS)
def test_experts(emulated: Any, form: str) -> None:
    random = torch.Generator().manual_seed(1)
    experts = QuantizedExpertWeights(
        [make(form, 96, 64, 32, s) for s in range(3)], [make(form, 64, 48, 16, s) for s in range(3)]
    )
    ids = torch.stack([torch.randperm(3, generator=random)[:2] for _ in range(40)]).int()
    x, weights = torch.randn(40, 64, generator=random) * 0.1, torch.rand(40, 2, generator=random)
    for scheme in [EXACT, INT8_PER_TOKEN] if form.startswith("int") else [EXACT]:
        want = quantized_experts_reference(experts, SILU, x, ids, weights, activations=scheme)
        got = CpuQuantizedExperts(emulated, experts, SILU, scheme)(x, ids, weights)
        assert (got.double() - want).norm() / want.norm() < (1e-5 if scheme is EXACT else 1e-2)
