from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from baton import native

ROOT = Path(__file__).parents[3]


def test_libraries_were_built_from_the_present_sources() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/build_native.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_a_missing_library_names_the_command_that_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "baton_native.so")
    with pytest.raises(ImportError, match=native.BUILD_COMMAND):
        native._load()


def test_functions_are_independent_of_each_other() -> None:
    one = native.function("line_holds", ctypes.c_int, ctypes.c_int64)
    other = native.function("line_holds", ctypes.c_uint8, keep_lock=True)
    assert one is not other
    assert other.argtypes is None
    assert one(-1) == other(-1) == 1
