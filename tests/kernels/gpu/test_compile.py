"""Triton's compiler takes the kernels: for a Hopper GPU, on any machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.child_env import child_env

MOST_SHARED_MEMORY = 227 * 1024
"""What a program may take on Hopper."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kernels_compile_for_hopper(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    env = child_env(TRITON_CACHE_DIR=str(tmp_path))
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.support.compile_kernels"]
    found = subprocess.run(command, env=env, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=800)
    assert found.returncode == 0, found.stderr
    shared = {line.split()[0]: int(line.split()[1]) for line in found.stdout.splitlines()}
    assert {"attend_kernel", "write_kernel", "merge_kernel", "_sample_kernel", "_copy_kernel"} <= shared.keys()
    assert max(shared.values()) <= MOST_SHARED_MEMORY
