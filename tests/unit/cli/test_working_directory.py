"""A working directory in which others have put files: what is started there runs none of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.cli.supervisor import ProcessSpec, start_python


async def test_children_take_no_modules_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "orjson.py"
    planted.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    child = await start_python(ProcessSpec("router", "baton_router.main", ("--help",), "", "router"), dict(os.environ))
    assert await child.wait() == 0
    assert not (tmp_path / "ran").exists()
