"""A pytest plugin: what is known of a test process that died, and how much memory each has used, for which tests.

``scripts/run_tests.py`` names the folder, in ``BATON_TEST_CRASHES``, where each process keeps a file: the stacks of
its threads where it dies of a signal that Python can still write them after, nothing where it is killed outright or
ends itself. The report of a run that fails for it is all that is left where nobody can look at the machine.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

import pytest

FOLDER = "BATON_TEST_CRASHES"
_STACKS = pytest.StashKey[IO[str]]()
_PEAK, _RISES = "peak_memory_kib", "peak_memory_rises"
_RISE_KIB = 256 * 1024
"""By so much a test raises the peak of its process to be named."""
_rises: list[str] = []


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Have the stacks written to a file of this process; after pytest's own plugin, which writes them to stderr."""
    if folder := os.environ.get(FOLDER):
        name = os.environ.get("PYTEST_XDIST_WORKER", "main")
        config.stash[_STACKS] = stacks = (Path(folder) / f"{name}.txt").open("w")
        faulthandler.enable(file=stacks)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The file is closed; there is nothing left to die of."""
    if (stacks := config.stash.get(_STACKS, None)) is not None:
        faulthandler.disable()
        stacks.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note the tests for which this process took much memory that none before had needed."""
    before = _peak()
    try:
        return (yield)
    finally:
        if (rise := _peak() - before) > _RISE_KIB:
            _rises.append(f"+{rise / 2**20:.1f} GiB for {item.nodeid}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that started this one how much memory it has used."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_PEAK], output[_RISES] = _peak(), _rises


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Say how a worker ended."""
    folder, name = os.environ.get(FOLDER), node.gateway.id
    if not folder:
        return
    output = getattr(node, "workeroutput", None)
    if error is None and output is not None:
        said = "\n  ".join([f"{name} used at most {output[_PEAK] / 2**20:.1f} GiB", *output[_RISES]])
    else:
        said = f"{name} died: {_status(node)}"
    with (Path(folder) / "ends.txt").open("a") as ends:
        ends.write(f"{said}\n")


def _peak() -> int:
    """Memory that this process has had at most, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status(node: Any) -> str:
    process = node.gateway._io.popen  # execnet has no public way to it
    try:
        code = process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        return "its process does not end"
    return f"signal {-code}" if code < 0 else f"exit status {code}"
