"""Compiles what Triton's host code would launch on a GPU, on a machine that has none, and reads what it takes.

Launches go through Triton's own host code, so that a kernel is compiled with the types, constants and divisibility that
its arguments have when it is launched: these decide how wide loads are, what is pipelined, and so shared memory.
Nothing is run: tensors are in host memory and outputs are not written. :func:`recorded_variants` tells which variants
would be compiled, without compiling them.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

from baton_kernels import gpu
from baton_kernels.gpu import tuning

_RESOURCES = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of GPU.

    Attributes:
        capability: Major and minor number.
        shared: Bytes of shared memory that a program may take.
        processors: Number of multiprocessors.
    """

    capability: tuple[int, int]
    shared: int
    processors: int

    @property
    def arch(self) -> int:
        """Number of the architecture, as ``sm_90`` has it."""
        return self.capability[0] * 10 + self.capability[1]


CARDS = {
    card.arch: card
    for card in (
        Card((8, 0), 163 * 1024, 108),  # A100
        Card((8, 9), 99 * 1024, 58),  # L4
        Card((9, 0), 227 * 1024, 132),  # H100
        Card((10, 0), 227 * 1024, 148),  # B200
        Card((12, 0), 99 * 1024, 188),  # RTX PRO 6000
    )
}


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        kernel: Name of the kernel.
        hash: Identity of the compiled variant.
        shared: Bytes of shared memory per program.
        registers: Registers per thread.
        spilled: Bytes of local memory per thread, which is where registers are spilled to.
        async_copies: Number of ``cp.async`` instructions.
        loads: Number of loads from global memory into registers.
        matrix: Number of ``wgmma`` instructions (Hopper's).
    """

    kernel: str
    hash: str
    shared: int
    registers: int
    spilled: int
    async_copies: int
    loads: int
    matrix: int


class _Driver:
    """The part of Triton's driver that compilations ask."""

    def __init__(self, card: Card) -> None:
        self._target = GPUTarget("cuda", card.arch, 32)
        self.utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": card.shared})

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(card: Card) -> Iterator[list[Any]]:
    """Compile launches for a card, with the configurations of its tables, and run none of them.

    Yields:
        The compiled kernels, in the order of their first launches.
    """
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if all(each is not kernel for each in compiled):
            compiled.append(kernel)
        return kernel

    tables = tuning.ranked_tables("no device of this name", card.capability, Path("/nowhere"))
    with contextlib.ExitStack() as undo:
        undo.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        undo.enter_context(mock.patch.object(tuning, "_tables", return_value=tables))
        _replace(undo, tuning.processors, lambda device: card.processors)
        _replace(undo, gpu.converts_fp8, lambda device: card.capability >= (8, 9))
        tuning._look_up.cache_clear()
        undo.callback(tuning._look_up.cache_clear)
        undo.enter_context(mock.patch.object(driver, "_active", _Driver(card)))
        yield compiled


@contextlib.contextmanager
def recorded_variants(card: Card, *, run: bool) -> Iterator[dict[str, set[str]]]:
    """Note which variants of kernels a card would compile, in a process where Triton's interpreter runs them.

    Args:
        card: The card.
        run: Whether the interpreter runs the launches, too.

    Yields:
        The variants of each kernel.
    """
    variants: dict[str, set[str]] = {}
    interpret = InterpretedFunction.run
    with contextlib.ExitStack() as undo:
        undo.enter_context(mock.patch.object(driver, "_active", _Driver(card)))
        _replace(undo, tuning.processors, lambda device: card.processors)
        backend = make_backend(_Driver(card).get_current_target())
        binders: dict[str, Any] = {}

        def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            name = self.__name__
            if name not in binders:
                jit = JITFunction(self.fn, **self.kwargs)
                binders[name] = create_function_from_signature(jit.signature, jit.params, backend)
            _, specialization, options = binders[name](*args, **{**kwargs, "debug": False})
            variants.setdefault(name, set()).add(compute_cache_key({}, specialization, options))
            return interpret(self, *args, grid=grid, warmup=warmup, **kwargs) if run else None

        undo.enter_context(mock.patch.object(InterpretedFunction, "run", note))
        yield variants


def _replace(undo: contextlib.ExitStack, function: Any, by: Any) -> None:
    """Replace a function of the kernels in all of their modules that have imported it."""
    name = function.__name__
    for module in [each for key, each in sys.modules.items() if key.startswith("baton_kernels")]:
        if getattr(module, name, None) is function:
            undo.enter_context(mock.patch.object(module, name, by))


def read_resources(kernel: Any, folder: Path) -> Resources:
    """Return what a compiled kernel takes, from its machine code; ``folder`` is for temporary files."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    command = [str(_RESOURCES), "--dump-resource-usage", str(binary)]
    usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    ptx = kernel.asm["ptx"]
    return Resources(
        kernel=kernel.metadata.name,
        hash=kernel.hash,
        shared=kernel.metadata.shared,
        registers=numbers["REG"],
        spilled=numbers["STACK"],
        async_copies=len(re.findall(r"\bcp\.async\.c[ag]\b", ptx)),
        loads=len(re.findall(r"\bld\.global\b", ptx)),
        matrix=len(re.findall(r"\bwgmma\.mma_async\b", ptx)),
    )
