"""At no time is there a plain copy of a quantized model: what loading one takes at most, and what stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.child_env import child_env
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.quantized_checkpoints import quantize_checkpoint, read_tensors

LAYERS, HIDDEN, INNER = 8, 512, 1536
SLACK = 12 << 20
"""Bytes that do not grow with the model: rotary tables, scratch memory of the checks at load, large pages, what the
allocator keeps. A plain copy in bfloat16 would be 50 MB."""


def loaded(tiny: Path, folder: Path, **options: str) -> dict[str, Any]:
    arguments = [str(tiny), str(folder), *(f"{name}={value}" for name, value in options.items())]
    command = [sys.executable, "-m", "tests.support.models.load_memory", *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=child_env(), timeout=480).stdout
    found: dict[str, Any] = json.loads(output)
    return found


def test_loading_takes_the_packed_size_and_a_layer(tmp_path: Path) -> None:
    """A layer: of weights in float32, as they are dequantized."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": 512}
    plain = make_checkpoint(tmp_path / "source", "llama", initializer_range=0.02, dtype="bfloat16", **sizes)
    tiny = quantize_checkpoint(make_checkpoint(tmp_path / "tiny", "llama"), tmp_path / "small", "ct-w4a16").folder
    made = quantize_checkpoint(plain, tmp_path, "ct-w4a16")
    packed = sum(tensor.nbytes for tensor in read_tensors(made.folder).values())
    layer = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
    found = loaded(tiny, made.folder, dtype="bfloat16")
    assert found["how"].startswith("fused decoder")
    assert found["peak"] <= 1.1 * packed + layer + SLACK, found
    assert found["resident"] <= 1.1 * packed + SLACK, found
