"""The instruction sets that the C++ operators are built for, and which of them this processor has."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Variant:
    """A build of the operators for one instruction set.

    Attributes:
        name: Part of the library's file name.
        needs: Features that the processor must have, as ``/proc/cpuinfo`` names them.
        march: Architecture, as ``-march`` names it.
        features: Further features that are switched on, as ``-m`` names them; on Arm they are appended to ``march``.
    """

    name: str
    needs: frozenset[str]
    march: str
    features: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        """File name of the library."""
        return f"baton_cpu-{self.name}.so"


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_X86_64 = (
    Variant(
        "x86-64-v4-bf16",
        _AVX512 | {"avx512_bf16", "avx512_vnni"},
        "x86-64-v4",
        features=("avx512bf16", "avx512vnni", "amx-tile", "amx-bf16", "amx-int8"),
    ),
    Variant("x86-64-v4-vnni", _AVX512 | {"avx512_vnni"}, "x86-64-v4", features=("avx512vnni",)),
    Variant("x86-64-v4", _AVX512, "x86-64-v4"),
    Variant("x86-64-v3-vnni", _AVX2 | {"avx_vnni"}, "x86-64-v3", features=("avxvnni",)),
    Variant("x86-64-v3", _AVX2, "x86-64-v3"),
    Variant("x86-64", frozenset(), "x86-64"),
)
_AARCH64 = (
    Variant("armv8.2-a-dotprod", frozenset({"asimddp"}), "armv8.2-a", features=("dotprod",)),
    Variant("armv8-a", frozenset(), "armv8-a"),
)
VARIANTS = {"x86_64": _X86_64, "aarch64": _AARCH64}
"""Builds by machine, the best first. AMX is used by intrinsics alone, where the processor and the kernel allow it."""


def sources_digest(folder: Path) -> str:
    """Return the digest of a folder's C++ sources, which the libraries built from them carry."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".cpp", ".h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def runnable_variants(machine: str = "") -> list[Variant]:
    """Return the builds that this processor can run, the best first; empty: there is none for it."""
    flags = _cpu_flags()
    return [each for each in VARIANTS.get(machine or platform.machine(), ()) if each.needs <= flags]


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line for line in lines if line.startswith(("flags", "Features")))  # x86, Arm
    return next((frozenset(line.split(":", 1)[1].split()) for line in flags), frozenset())
