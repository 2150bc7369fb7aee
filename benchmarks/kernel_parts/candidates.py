"""Finds the fastest configuration of each operator and shape by trying some, and writes this device's table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from benchmarks.kernel_parts.measure import Clock, Timed

from baton_kernels.gpu import tuning
from baton_kernels.gpu.tuning import Tuning

_TILES: dict[str, dict[str, tuple[int, ...]]] = {
    "attention_few": {"tile_m": (16,), "tile_n": (32, 64, 128), "warps": (4, 8), "stages": (2, 3), "programs": (2, 4)},
    "attention_many": {"tile_m": (64, 128), "tile_n": (64, 128), "warps": (4, 8), "stages": (2, 3)},
    "experts": {"tile_m": (16, 64), "tile_n": (64, 128), "tile_k": (64, 128), "warps": (4, 8), "stages": (3,)},
    "quantized_experts": {"tile_m": (16, 64), "tile_n": (64, 128), "tile_k": (64, 128), "warps": (4,), "stages": (3,)},
    "eight_bit_linear": {
        "tile_m": (16, 64, 128), "tile_n": (64, 128), "tile_k": (128, 256), "warps": (4, 8), "stages": (3, 4),
        "programs": (1, 3),
    },
    "quantized_linear": {
        "tile_m": (0, 16, 32, 64, 128), "tile_n": (64, 128), "tile_k": (64, 128), "warps": (4, 8), "stages": (3, 4),
        "programs": (1, 3),
    },
}  # fmt: skip
"""What is tried of each operator: all combinations that its shape has use for."""


def candidates(operator: str, rows: int) -> Iterator[Tuning]:
    """Yield configurations for so many rows: tiles that would be mostly empty are left out, as are useless ones."""
    tiles = _TILES[operator]
    for values in itertools.product(*tiles.values()):
        result = Tuning(**dict(zip(tiles, values, strict=True)))
        if rows and operator.endswith("_linear"):
            if result.tile_m > max(16, 2 * rows) or (result.tile_m and result.tile_m * 16 < rows):
                continue
            if not result.tile_m and (rows < 64 or (result.warps, result.stages, result.programs) != (4, 3, 1)):
                continue
        yield result


class Tuner:
    """Collects entries of a table.

    Args:
        clock: Clock of the device, in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._found: dict[str, list[tuple[tuning.When, Tuning]]] = {}

    def tune(self, case: Timed) -> None:
        """Keep the fastest configuration of a case, if it has any."""
        if case.tunes is None:
            return
        operator, when = case.tunes
        if any(known == when for known, _ in self._found.get(operator, ())):
            return
        tokens = when.get("tokens", (0, 0))
        rows = min(int(tokens[1]), 2048) if not isinstance(tokens, str) else 0
        best: tuple[float, Tuning] | None = None
        for each in candidates(operator, rows):
            with tuning.trial(operator, each):
                try:
                    seconds = self._clock.seconds(case.run, captured=case.captured)
                except (triton.runtime.errors.OutOfResources, triton.CompilationError):
                    continue
            if best is None or seconds < best[0]:
                best = seconds, each
        if best is not None:
            print(f"{case.name}: {1e6 * best[0]:.1f} us with {best[1]}", flush=True)
            self._found.setdefault(operator, []).append((when, best[1]))

    def write(self) -> Path:
        """Write the table to this machine's folder."""
        name = torch.cuda.get_device_name()
        path = tuning.LOCAL_TABLES.expanduser() / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
        note = f"benchmarks/kernels.py --tune, triton {triton.__version__}, torch {torch.__version__}"
        tuning.write_table(path, name, note, self._found)
        return path
