"""Linear layers with quantized weights beside the bfloat16 one: milliseconds of processor time of one call.

Random weights; the ways take turns, and the fastest of ``--repeats`` counts. ``sets`` copies of each weight are gone
through, so that they come from memory as in a step, and not from the last-level cache. One thread: with more, what
waits for another one would count.

    python benchmarks/kernels/quantized_linear.py --write
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from baton_kernels.cpu import CpuLibrary, load_library, runnable_variants
from baton_kernels.linear import AmxLinear, CpuLinear, PackedLinear, PairsLinear
from baton_kernels.quantization import EXACT, INT8_PER_TOKEN, quantize_fp8, quantize_int4, quantize_int8, quantize_nf4
from baton_kernels.quantized_linear import CpuQuantizedLinear

RESULT = Path(__file__).parents[1] / "results" / "quantized_linear.json"
WAYS = {
    "int8": (quantize_int8, INT8_PER_TOKEN),
    "int4": (quantize_int4, INT8_PER_TOKEN),
    "int8-exact": (quantize_int8, EXACT),
    "int4-exact": (quantize_int4, EXACT),
    "fp8-exact": (quantize_fp8, EXACT),
    "nf4-exact": (quantize_nf4, EXACT),
}
"""How the weight, and how inputs are rounded."""
SHAPES = ((2048, 2048), (768, 768), (8192, 2048), (2048, 8192))
"""(inputs, outputs)."""
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
SET_BYTES = 96 << 20
"""Of bfloat16 weights that are gone through."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--shapes", type=shape, nargs="*", default=list(SHAPES), help="INPUTSxOUTPUTS")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--write", action="store_true", help=f"write {RESULT}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    library = load_library(runnable_variants()[0])
    results = {f"{i}x{o}": one_shape(library, i, o, args) for i, o in args.shapes}
    if args.write:
        result = {
            "benchmark": "quantized_linear",
            "ms_of_processor_time": results,
            "instructions": library.instructions,
        }
        RESULT.write_text(
            json.dumps({**result, "machine": platform.processor(), "torch": torch.__version__}, indent=2) + "\n"
        )
    return 0


def shape(text: str) -> tuple[int, int]:
    inputs, outputs = map(int, text.split("x"))
    return inputs, outputs


def one_shape(library: CpuLibrary, inputs: int, outputs: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return milliseconds by way and rows."""
    sets = max(1, SET_BYTES // (2 * inputs * outputs))
    layers: dict[str, list[Any]] = {name: [] for name in ("bfloat16", *args.ways)}
    for _ in range(sets):
        weight = (torch.randn(outputs, inputs) * 0.02).bfloat16()
        layers["bfloat16"].append(plain(library, weight))
        for name in args.ways:
            quantize, activations = WAYS[name]
            layers[name].append(CpuQuantizedLinear(library, quantize(weight), None, activations))
    print(f"\n{inputs} x {outputs}, ms (and times as fast as bfloat16)")
    print(f"{'rows':>6}" + "".join(f"{name:>18}" for name in layers))
    result: dict[str, dict[str, float]] = {name: {} for name in layers}
    for rows in args.rows:
        x = torch.randn(rows, inputs).bfloat16()
        best = dict.fromkeys(layers, float("inf"))
        for _ in range(args.repeats):
            for name, copies in layers.items():
                begin = time.thread_time()
                for layer in copies:
                    layer(x)
                best[name] = min(best[name], (time.thread_time() - begin) / sets)
        for name, seconds in best.items():
            result[name][str(rows)] = round(1e3 * seconds, 4)
        print(
            f"{rows:6}" + "".join(f"{1e3 * s:10.3f} ({best['bfloat16'] / s:4.2f})" for s in best.values()), flush=True
        )
    return result


def plain(library: CpuLibrary, weight: torch.Tensor) -> PackedLinear:
    """Return the layer that an engine would take for bfloat16 here."""
    if library.amx:
        return AmxLinear(library, weight)
    return (PairsLinear if library.pairs_are_faster else CpuLinear)(library, weight)


if __name__ == "__main__":
    raise SystemExit(main())
