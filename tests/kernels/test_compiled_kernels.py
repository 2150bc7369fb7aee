"""Triton's compiler takes every launch of the kernels, for every kind of GPU, and what it makes of them fits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.child_env import child_env

pytest.importorskip("triton")
from tests.support.gpu_compiler import CARDS

MOST_SPILLED = 128
"""Bytes of local memory of a thread: 32 registers of 255. More are stored and loaded for each tile."""
MORE_SPILLED = {
    "experts int4-96": 512,
    "int4-96": 320,
    "experts int4-128 f32": 320,
    "rejection given": 192,
    "gemma2 bf16 kv-": 160,
}
"""Of what is rare: groups that are no power of two, whose scales are looked up for each value; 4 bits with float32;
draft probabilities that are given (sm_100, sm_120: a few rows a step); heads of 256 with quantized KV (sm_120)."""
KERNELS = {
    *("write_kernel", "attend_kernel", "merge_kernel", "linear_kernel", "sum_kernel", "eight_bit_kernel"),
    *("dequantize_kernel", "_gate_up_kernel", "_down_kernel", "quantized_gate_up_kernel", "quantized_down_kernel"),
    *("_rms_norm_kernel", "_gated_kernel", "_sample_kernel", "_rejection_kernel"),
    *("_copy_kernel", "_copy_blocks_kernel"),
}


def compile_launches(arch: int, folder: Path, *options: str) -> list[dict[str, Any]]:
    """Return what the launches' kernels take, in a process of its own: here the interpreter runs them."""
    env = child_env(TRITON_CACHE_DIR=str(folder))
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.support.compile_kernels", str(arch), *options]
    root = Path(__file__).parents[2]
    found = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=3000)
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def check(arch: int, found: list[dict[str, Any]]) -> None:
    assert not [each for each in found if "error" in each]
    assert {each["kernel"] for each in found} == KERNELS
    limit = CARDS[arch].shared
    assert not [each for each in found if each["shared"] > limit]
    assert not [each for each in found if each["spilled"] > most_spilled(each["launch"])]


def most_spilled(launch: str) -> int:
    return next((most for pattern, most in MORE_SPILLED.items() if re.search(pattern, launch)), MOST_SPILLED)


@pytest.mark.slow
def test_each_kernel_compiles(tmp_path: Path) -> None:
    check(90, compile_launches(90, tmp_path, "--brief"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", CARDS)
def test_each_launch_compiles(arch: int, tmp_path: Path) -> None:
    check(arch, compile_launches(arch, tmp_path))
