"""The check for shared memory that is left behind looks at what is ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.transport import shared_memory


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "_FOLDER", tmp_path)
    monkeypatch.setattr(shared_memory, "_PATIENCE_S", 0.0)
    return tmp_path


def test_a_file_that_another_program_makes_meanwhile_is_no_leak(folder: Path) -> None:
    before = shared_memory.segments()
    (folder / "somebodys.db").write_bytes(b"x")
    assert shared_memory.left_behind(before) == set()


@pytest.mark.parametrize(
    "name", ["ucx_shm_posix_1f", f"torch_{os.getpid()}_1", "psm_12ab34cd"], ids=["ucx", "torch", "psm"]
)
def test_a_segment_of_ours_is_one(folder: Path, name: str) -> None:
    before = shared_memory.segments()
    (folder / name).write_bytes(b"x")
    assert shared_memory.left_behind(before) == {name}
