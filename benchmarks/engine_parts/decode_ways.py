"""What a decode step gains on a CPU from layers that are one list of calls, and from attention by pairs of bfloat16.

Three engines over one random Llama of 125M parameters take turns: as they are; with layers run operator by operator;
and with attention in float32 (the same where the processor does not multiply pairs faster). Context 512, 64 new tokens;
milliseconds of a step, medians of each turn's steps, the fastest turn. On a Zen 4 with two threads bfloat16 takes 8.7,
9.0 and 8.7 ms at batch 1, 10.2, 10.6 and 10.8 at batch 8; int4 2.7, 3.2 and 2.9, and 6.5, 7.2 and 7.3.

    python benchmarks/engine_parts/decode_ways.py
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.engine import Measure, machine, make_baton, prompts_of
from benchmarks.engine_parts.models import write_model

from baton.engine.models import fused
from baton.engine.models.fused import LayerProgram, UnboundError
from baton_kernels.paged_attention.cpu import CpuPagedAttention

WAYS = ("as it is", "operator by operator", "attention in float32")
NEW_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), "llama", smoke=False)
        for quantization in (None, "int4"):
            engines = {way: engine(way, folder, args.threads, quantization) for way in WAYS}
            for workload in ("decode_1", "decode_8"):
                steps = dict.fromkeys(WAYS, float("inf"))
                for turn in range(args.turns):
                    for way, measure in engines.items():
                        prompts = prompts_of(workload, turn, model.vocab_size)
                        steps[way] = min(steps[way], step_ms(measure, prompts))
                result[f"{quantization or 'bfloat16'} {workload}"] = {way: round(ms, 2) for way, ms in steps.items()}
    print(json.dumps({"threads": args.threads, "step_ms": result, "machine": machine()}, indent=2))


def engine(way: str, folder: str, threads: int, quantization: str | None) -> Measure:
    """Make an engine that runs in one of the ways."""
    program: Callable[..., LayerProgram] = fused.LayerProgram
    prepare = CpuPagedAttention.__init__
    if way == "operator by operator":
        fused.LayerProgram = refuse  # type: ignore[misc,assignment]
    if way == "attention in float32":
        CpuPagedAttention.__init__ = in_float32  # type: ignore[method-assign]
    try:
        return make_baton(folder, SimpleNamespace(threads=threads, clock="wall"), quantization)[0]  # type: ignore[arg-type]
    finally:
        fused.LayerProgram = program  # type: ignore[misc,assignment]
        CpuPagedAttention.__init__ = prepare  # type: ignore[method-assign]


def refuse(*_: Any) -> None:
    raise UnboundError("not in this way")


_PREPARE = CpuPagedAttention.__init__


def in_float32(attention: CpuPagedAttention, library: Any) -> None:
    _PREPARE(attention, library)
    attention._pairs = False


def step_ms(measure: Measure, prompts: list[list[int]]) -> float:
    """The median time between two tokens of the first sequence."""
    times = measure(prompts, NEW_TOKENS)[0]
    gaps = sorted(after - before for before, after in itertools.pairwise(times))
    return 1e3 * gaps[len(gaps) // 2]


if __name__ == "__main__":
    main()
