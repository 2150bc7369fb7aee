"""What loading a quantized checkpoint takes, at most and afterwards, beside its size: each format, in one process each.

Checkpoints are of random bytes, in the shape of a model of 0.8B parameters with an untied head (``--shape small``: of
27M, to see that it runs); they are written to ``--folder`` and removed again. A peak may be 1.1 times the packed size
and one layer, unpacked to float32. The bfloat16 row is the plain checkpoint, which the others' residents are compared
with: with its file, and with what Baton itself takes for it.

    python benchmarks/load_memory.py
    python benchmarks/load_memory.py --formats ct-w4a16 gguf-q4_k int4
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import shutil
import tempfile

from tests.support.models.load_memory import Found, measure
from tests.support.models.random_checkpoints import FORMATS, GGUF_KINDS, Shape, write_random

SHAPES = {
    "0.8b": Shape(hidden=1024, inner=3584, layers=52, heads=16, kv_heads=8, vocab=32000),
    "small": Shape(hidden=512, inner=1536, layers=8, heads=8, kv_heads=8, vocab=512),
}
TINY = Shape(hidden=256, inner=256, layers=1, heads=4, kv_heads=4, vocab=512)
AT_LOAD = {"int8": 8.0, "int4": 4 + 16 / 64, "fp8": 8.0, "nf4": 4 + 16 / 64}
"""Quantization at load, and the bits that a value takes then."""
MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*FORMATS, *GGUF_KINDS, *AT_LOAD]
    parser.add_argument("--formats", nargs="+", default=every, choices=every, metavar="FORMAT", help=" ".join(every))
    parser.add_argument("--shape", default="0.8b", choices=SHAPES)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to write checkpoints")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    plain_file = 0
    layer = 4 * shape.layer_elements
    print(f"{shape.parameters / 1e6:.0f}M parameters, a layer in float32 {layer / MB:.1f} MB; all in MB")
    print("| | packed | peak | allowed | resident | of it pages of files | / bfloat16's files | / Baton's bfloat16 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    plain: Found | None = None
    plain_file = 2 * shape.parameters
    for form in ["bfloat16", *(form for form in args.formats if form != "bfloat16")]:
        packed, result = one(form, shape, args.folder)
        plain = plain or result
        ratio = result.resident / plain_file, result.resident / plain.resident
        print(
            f"| {form} | {packed / MB:.0f} | {result.peak / MB:.0f} | {(1.1 * packed + layer) / MB:.0f} "
            f"| {result.resident / MB:.0f} | {(result.resident - result.anonymous) / MB:.0f} "
            f"| {ratio[0]:.2f} | {ratio[1]:.2f} |",
            flush=True,
        )


def one(form: str, shape: Shape, folder: Path) -> tuple[int, Found]:
    """Return the packed bytes of a model in a format, and what loading it takes."""
    fields = {"dtype": "bfloat16"} | ({"quantization": form} if form in AT_LOAD else {})
    root = Path(tempfile.mkdtemp(prefix="baton-load-memory-", dir=folder))
    try:
        stored = "bfloat16" if form in AT_LOAD else form
        tiny, _ = write_random(root / "tiny", stored, TINY)
        model, packed = write_random(root / "model", stored, shape)
        if form in AT_LOAD:
            packed = int(shape.layers * shape.layer_elements * AT_LOAD[form] / 8) + 4 * shape.vocab * shape.hidden
        return packed, measure([(tiny, model, fields)])[0]
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
