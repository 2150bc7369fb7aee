"""At no time is there a plain copy of a quantized model: what loading one takes at most, and what stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.models.load_memory import Found, measure
from tests.support.models.random_checkpoints import Shape, write_random

SHAPE = Shape(hidden=512, inner=1536, layers=8, heads=8, kv_heads=8, vocab=512)
TINY = Shape(hidden=256, inner=256, layers=1, heads=4, kv_heads=4, vocab=512)
LAYER = 4 * SHAPE.layer_elements
"""Bytes of the largest layer unpacked, in float32: what its dequantization to that, all of it at once, would take."""
FORMS = ("ct-w4a16", "bnb-nf4", "gguf-q4_0")
FIXED = 9 << 20
"""Bytes that stay and do not grow with the weights: rotary tables, what a step and its threads work in, the rest of a
large page, Python's objects. A plain copy would be 60 MB."""
NOTHING_KEPT = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""The C library gives back what is freed at once. Otherwise a peak differs by 10 MB from run to run, by what of it lies
where the next layer's does not fit."""
BITS = {"int8": 8}
"""Of a value quantized at load; scales of a row do not count. The other formats and schemes are in
``benchmarks/load_memory.py``."""


def packed_at_load(bits: int) -> int:
    """Bytes of a plain checkpoint's tensors once those of linear layers are quantized."""
    return SHAPE.layers * SHAPE.layer_elements * bits // 8 + 2 * 2 * SHAPE.vocab * SHAPE.hidden


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, Found]]:
    """Packed bytes of each format and quantization at load, and what loading it took; all in one process."""
    root = tmp_path_factory.mktemp("memory")
    loads: dict[str, tuple[Path, Path, dict[str, Any]]] = {}
    packed: dict[str, int] = {}
    for form in (*FORMS, "bfloat16"):
        tiny, _ = write_random(root / f"tiny-{form}", form, TINY)
        model, packed[form] = write_random(root / form, form, SHAPE)
        loads[form] = (tiny, model, {"dtype": "bfloat16"})
    tiny, model, fields = loads.pop("bfloat16")
    for scheme, bits in BITS.items():
        packed[scheme] = packed_at_load(bits)
        loads[scheme] = (tiny, model, {**fields, "quantization": scheme})
    given = list(loads.values())
    # The first is loaded twice and counts once: what a process keeps for any later load, 6 MB, is not a model's.
    each = measure([given[0], *given], **NOTHING_KEPT)[1:]
    return {form: (packed[form], memory) for form, memory in zip(loads, each, strict=True)}


@pytest.mark.parametrize("form", [*FORMS, *BITS])
def test_loading_takes_the_packed_size_and_a_layer(found: dict[str, tuple[int, Found]], form: str) -> None:
    packed, memory = found[form]
    assert memory.how.startswith("fused decoder")
    assert memory.peak <= 1.1 * packed + LAYER, f"{memory}, packed {packed}"
    assert memory.resident <= 1.1 * packed + FIXED, f"{memory}, packed {packed}"
