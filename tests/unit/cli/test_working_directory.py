"""A working directory in which others have put files: what is started there runs none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.child_process import start_python


def test_children_take_no_modules_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = tmp_path / "orjson.py"
    planted.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    assert start_python("baton_router.main", ["--help"]).wait() == 0
    assert not (tmp_path / "ran").exists()
