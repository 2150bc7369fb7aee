"""Times of operators on a GPU, and the ceilings that they are compared with, measured on the same one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

FLUSH_BYTES = 256 << 20
"""Written between two runs, so that nothing is left in the L2 cache (50 MB on Hopper)."""
COPY_BYTES = 2 << 30
MATRIX = 8192
RUNS = 20
SECONDS_PER_CASE = 0.5

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Check:
    """What is compared before anything is timed: an operator at small shapes with its definition.

    Attributes:
        name: Operator and case.
        run: Returns the largest error as a share of the tolerance: above 1 it is wrong.
    """

    name: str
    run: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Timed:
    """What is timed.

    Attributes:
        name: Operator and shape.
        run: The operator.
        nbytes: Bytes that have to be read and written, each once; ``flops``: operations of its products.
        rivals: Others that compute the same, by name; what they return is compared with what ``run`` does.
        captured: Whether it is timed as a CUDA graph, without the time of launches.
        tunes: Operator and sizes in tables of configurations (:mod:`baton_kernels.gpu.tuning`), if it has any there.
    """

    name: str
    run: Run
    nbytes: float = 0.0
    flops: float = 0.0
    rivals: dict[str, Run] = field(default_factory=dict)
    captured: bool = True
    tunes: tuple[str, dict[str, tuple[int, int] | str]] | None = None


class Clock:
    """Times what runs on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def seconds(self, run: Run, *, captured: bool = True) -> float:
        """Return the median time of a run with cold caches."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles, allocates, warms up
                run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        replay = run
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            replay = graph.replay
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < RUNS and (len(times) < 3 or time.perf_counter() - begin < SECONDS_PER_CASE):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            first.record()
            replay()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e3)
        return statistics.median(times)

    def ceilings(self) -> dict[str, float]:
        """Return the bandwidth of a copy, bytes read and written per second, and the rate of a bfloat16 product."""
        pair = [torch.empty(COPY_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2)]
        copied = self.seconds(lambda: pair[0].copy_(pair[1]))
        pair.clear()
        a, b = (torch.randn(MATRIX, MATRIX, device=self._device, dtype=torch.bfloat16) for _ in range(2))
        multiplied = self.seconds(lambda: a @ b)
        return {"copy_bytes_per_s": 2 * COPY_BYTES / copied, "matrix_flops_per_s": 2 * MATRIX**3 / multiplied}


def error(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> float:
    """Return the largest difference as a share of a tolerance, which counts from the largest number that is wanted."""
    got = got.double().cpu()
    want = want.double().cpu()
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got - want).abs().max() / (tolerance * max(1.0, float(want.abs().max()))))
