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
    ("beside", "alone", "args", "status"),
    [
        (PASSES, PASSES, ("--workers", "2"), 0),
        (FAILS, PASSES, (), 1),
        (PASSES, FAILS, (), 1),
        (PASSES, "", (), 5),
        ("", PASSES, (), 5),
        (PASSES, "", ("-k", "test_a"), 0),
        (PASSES, PASSES, ("-k", "test_c"), 5),
        ("import nothing_of_this_name\n", PASSES, (), 2),
        (FAILS, PASSES, ("-m", "alone"), 0),
    ],
)
def test_it_succeeds_only_if_both_runs_do(
    script: ModuleType,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    beside: str,
    alone: str,
    args: tuple[str, ...],
    status: int,
) -> None:
    (tmp_path / "test_beside.py").write_text(beside)
    (tmp_path / "test_alone.py").write_text(ALONE + alone)
    assert script.main(args or ("--workers", "1")) == status
    said = capfd.readouterr().out
    assert ("all of it succeeded" in said) == (status == 0)
    failed = [line for line in said.splitlines() if line.startswith("FAILED") and " - " not in line]
    if status == 1:
        assert failed == [f"FAILED {'test_beside' if beside == FAILS else 'test_alone'}.py::test_b"]
