"""``scripts/run_tests.py``: two runs of pytest, one status, one summary."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/run_tests.py"
PASSES, FAILS = "def test_a(): pass\n", "def test_b(): assert 1 + 1 == 3\n"
ALONE = "import pytest\npytestmark = pytest.mark.alone\n"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("baton_run_tests", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone: .\n")
    return module


@pytest.mark.parametrize(
    ("statuses", "chosen", "status"),
    [
        ((0, 0), False, 0),
        ((1, 0), False, 1),
        ((0, 1), True, 1),
        ((0, 5), False, 5),
        ((5, 0), False, 5),
        ((0, 5), True, 0),
        ((5, 1), True, 1),
        ((5, 5), True, 5),
        ((2,), False, 2),
    ],
)
def test_it_succeeds_only_if_all_of_it_does(
    script: ModuleType, statuses: tuple[int, ...], chosen: bool, status: int
) -> None:
    assert script.status_of([script.Run("run", each) for each in statuses], chosen=chosen) == status


@pytest.mark.parametrize(
    ("beside", "alone", "args", "status", "counted"),
    [
        (PASSES, PASSES, ["--workers", "2"], 0, [": 1 passed in", ": 1 passed in"]),
        (PASSES, FAILS, ["--workers", "1"], 1, [": 1 passed in", ": 1 failed in"]),
        (FAILS, PASSES, ["--workers", "1", "-m", "alone"], 0, [": no tests in", ": 1 passed in"]),
        ("import nothing_of_this_name\n", PASSES, ["--workers", "1"], 2, [": 1 failed in"]),
    ],
)
def test_both_runs_end_in_one_summary(
    script: ModuleType,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    beside: str,
    alone: str,
    args: list[str],
    status: int,
    counted: list[str],
) -> None:
    (tmp_path / "test_beside.py").write_text(beside)
    (tmp_path / "test_alone.py").write_text(ALONE + alone)
    assert script.main(args) == status
    summary = capfd.readouterr().out.partition("==================== tests")[2].splitlines()
    assert ("all of it succeeded" in summary) == (status == 0)
    assert len(summary) == 2 + len(counted) + (status != 0)
    for line, found in zip(summary[1:], counted, strict=False):
        assert found in line
    assert ("FAILED test_alone.py::test_b" in summary) == (status == 1)


@pytest.fixture
def watched(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script over tests whose conftest loads the plugin."""
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[1]))
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.support.crashes"]\n')
    return script


def test_a_worker_that_dies_leaves_its_stacks_and_its_signal(
    watched: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_beside.py").write_text(
        "import os, signal\n"
        "def test_a(): pass\n"
        "def test_b(): os.kill(os.getpid(), signal.SIGSEGV)\n"
        "def test_c(): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert watched.main(["--workers", "2"]) == 1
    summary = capfd.readouterr().out.partition("==================== tests")[2]
    assert "Segmentation fault" in summary
    assert "in test_b" in summary
    for said in ("died: signal 11", "died: signal 9"):
        assert said in summary


def test_each_worker_tells_its_peak_memory_and_which_tests_raised_it(
    watched: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_beside.py").write_text(
        "def test_a(): assert len(bytes([1]) * (300 << 20)) > 0\ndef test_b(): pass\n"
    )
    watched.main(["--workers", "2", "-m", "not alone"])
    summary = capfd.readouterr().out.partition("==================== tests")[2]
    assert summary.count("used at most 0.") == 2
    assert "+0.3 GiB for test_beside.py::test_a" in summary
    assert "test_beside.py::test_b" not in summary
