from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from baton.native import COMPILERS, load_helper

needs_compiler = pytest.mark.skipif(not any(shutil.which(x) for x in COMPILERS), reason="no C compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("BATON_CACHE_DIR", str(folder))
    return folder


def write(folder: Path, name: str, value: int) -> Path:
    (folder / "source").mkdir(exist_ok=True)
    source = folder / "source" / name
    source.write_text(f"int baton_answer(void) {{ return {value}; }}\n")
    return source


def load_as_another_process(source: Path) -> int:
    library = load_helper.__wrapped__(source)
    assert library is not None
    return library.baton_answer()


@needs_compiler
def test_a_helper_is_built_wherever_its_source_lies(tmp_path: Path, cache: Path) -> None:
    source = write(tmp_path, "answer.c", 42)
    library = load_helper(source)
    assert library is not None
    assert library.baton_answer() == 42
    assert list(source.parent.iterdir()) == [source], "nothing is left beside it"
    assert [path.suffix for path in cache.iterdir()] == [".so"]


@needs_compiler
def test_what_was_built_is_found_again_until_its_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path, "kept.c", 1)
    assert load_as_another_process(source) == 1
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
        assert load_as_another_process(source) == 1
    write(tmp_path, "kept.c", 2)
    assert load_as_another_process(source) == 2
    (source.parent / "kept.h").write_text("#define BATON_OTHER\n")
    assert load_as_another_process(source) == 2


@needs_compiler
@pytest.mark.parametrize("damage", ["shared", "file"])
def test_without_a_folder_of_ones_own_nothing_is_kept(tmp_path: Path, cache: Path, damage: str) -> None:
    if damage == "shared":
        cache.mkdir()
        cache.chmod(0o777)
    else:
        cache.write_text("")
    assert load_as_another_process(write(tmp_path, f"{damage}.c", 7)) == 7
    assert cache.is_file() or not list(cache.iterdir())


def test_what_cannot_be_built_is_none(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "broken.c"
    source.write_text("this is not C\n")
    assert load_helper(source) is None
    assert load_helper(source, ("no-such-compiler",)) is None
    fine = tmp_path / "fine.c"
    fine.write_text("int baton_fine;\n")
    shutil.rmtree(cache, ignore_errors=True)
    cache.write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "no such folder"))
    assert load_helper(fine) is None
