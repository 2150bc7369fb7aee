"""``benchmarks/kernels.py`` as far as a CPU can run it: its checks, and that it says when there is no device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.child_env import child_env

ROOT = Path(__file__).parents[3]
OPERATORS = ("attention", "rms_norm", "silu_mul", "kv_copy", "sample", "rejection_sample", "linear", "moe")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("triton")
    command = [sys.executable, "benchmarks/kernels.py", *arguments]
    return subprocess.run(command, env=child_env(), cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_its_checks_run_on_a_cpu() -> None:
    found = run("--interpret")
    assert found.returncode == 0, found.stderr + found.stdout
    lines = found.stdout.splitlines()
    assert all(" right " in line for line in lines)
    assert all(any(line.startswith(operator) for line in lines) for operator in OPERATORS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so_in_a_line() -> None:
    found = run("--write")
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.count("\n") == 1
    assert "no CUDA device" in found.stderr
