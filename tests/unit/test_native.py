from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baton.native import COMPILERS, load_helper


@pytest.mark.skipif(not any(shutil.which(x) for x in COMPILERS), reason="no C compiler")
def test_a_helper_is_built_wherever_its_source_lies(tmp_path: Path) -> None:
    source = tmp_path / "answer.c"
    source.write_text("int baton_answer(void) { return 42; }\n")
    library = load_helper(source)
    assert library is not None
    assert library.baton_answer() == 42
    assert list(tmp_path.iterdir()) == [source], "nothing is left beside it"


def test_what_cannot_be_built_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "broken.c"
    source.write_text("this is not C\n")
    assert load_helper(source) is None
    assert load_helper(source, ("no-such-compiler",)) is None
    fine = tmp_path / "fine.c"
    fine.write_text("int baton_fine;\n")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "no such folder"))
    assert load_helper(fine) is None
