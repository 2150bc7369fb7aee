from __future__ import annotations

import multiprocessing
import os
import shutil
import stat
from pathlib import Path

import pytest

from baton_kernels.cpu import BuildError, CpuLibrary, build, load_library
from baton_kernels.cpu.build import build_library


@pytest.fixture
def quick_sources(tmp_path: Path, library: CpuLibrary, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One small source in place of the real ones, so that building takes a moment."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    return sources


def test_the_cache_is_used_and_private(quick_sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "baton"
    first = build_library(cache, link_openmp=False)
    written = first.stat().st_mtime_ns
    assert build_library(cache, link_openmp=False) == first
    assert first.stat().st_mtime_ns == written
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert {path.suffix for path in cache.iterdir()} == {".so", ".lock"}  # no half-built leftovers


def test_other_sources_make_another_library(quick_sources: Path, tmp_path: Path) -> None:
    first = build_library(tmp_path / "cache", link_openmp=False)
    (quick_sources / "one.cpp").write_text('extern "C" int answer() { return 43; }\n')
    assert build_library(tmp_path / "cache", link_openmp=False) != first


def test_a_compiler_error_is_one_line(quick_sources: Path, tmp_path: Path) -> None:
    (quick_sources / "one.cpp").write_text("int answer( {\n")
    with pytest.raises(BuildError, match="error") as caught:
        build_library(tmp_path / "cache", link_openmp=False)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*.so"))


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        load_library(tmp_path)


def test_a_cache_that_cannot_be_written_to(quick_sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot write"):
        build_library(tmp_path / "file" / "cache", link_openmp=False)


def test_a_held_lock_is_not_waited_for_without_end(
    quick_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_library(tmp_path / "cache", link_openmp=False)
    path.unlink()
    monkeypatch.setattr(build, "BUILD_SECONDS", 0.2)
    with build._locked(path.with_suffix(".lock")), pytest.raises(BuildError, match="too long"):
        build_library(tmp_path / "cache", link_openmp=False)


def _build(sources: Path, cache: Path, results: multiprocessing.Queue[str]) -> None:
    build.SOURCES = sources
    results.put(f"{os.getpid()} {build_library(cache, link_openmp=False).stat().st_ino}")


def test_processes_that_start_together_build_once(quick_sources: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[str] = context.Queue()
    workers = [context.Process(target=_build, args=(quick_sources, tmp_path / "cache", results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    inodes = {results.get(timeout=60).split()[1] for _ in workers}
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    assert len(inodes) == 1
