"""Runs the tests: on several workers beside each other, then, one by one, those that need the machine for themselves.

Arguments are pytest's; ``--workers`` says how many workers there are, 1: everything in one sequence. The exit status
is pytest's: 0 only if both runs succeed, 5 if there was no test, and also if one of them had none although no argument
chose among the tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

OK, FAILED, NO_TESTS = 0, 1, 5
"""pytest's exit statuses; those between are ends before all tests have run."""


@dataclass
class Run:
    """One of the two runs.

    Attributes:
        name: What is printed of it.
        status: pytest's exit status.
        seconds: How long it took.
        counts: Tests by outcome: ``passed``, ``failed``, ``skipped``.
        failed: Names of those that failed, or whose set-up or tear-down did.
        ends: How its processes ended, and the stacks of those that died (``tests/support/crashes.py``).
    """

    name: str
    status: int = OK
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)

    def read(self, report: Path) -> None:
        """Take over what pytest's JUnit report says; there is none if it ended before it began."""
        if not report.exists():
            return
        outcomes: dict[str, str] = {}
        for case in ET.parse(report).iter("testcase"):
            name = f"{case.get('file') or case.get('classname')}::{case.get('name')}"
            if case.find("failure") is not None or case.find("error") is not None:
                outcomes[name] = "failed"
            else:
                outcomes.setdefault(name, "passed" if case.find("skipped") is None else "skipped")
        self.counts = Counter(outcomes.values())
        self.failed = [name for name, outcome in outcomes.items() if outcome == "failed"]

    def __str__(self) -> str:
        found = ", ".join(f"{number} {outcome}" for outcome, number in sorted(self.counts.items())) or "no tests"
        return f"{self.name}: {found} in {self.seconds:.0f} s (status {self.status})"


def pytest(name: str, args: Sequence[str]) -> Run:
    """Run pytest and read its report."""
    run, begun = Run(name), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="baton-tests-") as folder:
        report = Path(folder) / "report.xml"
        # The older form names the files.
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "-o", "junit_family=xunit1", *args]
        run.status = subprocess.run(command, check=False, env={**os.environ, "BATON_TEST_CRASHES": folder}).returncode
        run.read(report)
        run.ends = [line for file in sorted(Path(folder).glob("*.txt")) for line in file.read_text().splitlines()]
    run.seconds = time.monotonic() - begun
    return run


def status_of(runs: Sequence[Run], *, chosen: bool) -> int:
    """Return the exit status of all runs together.

    Args:
        runs: All of them.
        chosen: Whether arguments chose among the tests, so that one of the runs may be left without any.
    """
    statuses = [run.status for run in runs]
    if chosen and any(status != NO_TESTS for status in statuses):
        statuses = [status for status in statuses if status != NO_TESTS]
    return next((status for status in statuses if status != OK), OK)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests beside each other")
    parser.add_argument("-m", default="", help="pytest's: only tests with these markers")
    ours, theirs = parser.parse_known_args(argv)
    only = f"({ours.m}) and " if ours.m else ""
    # Whoever has nothing left takes half of what another has before it: files stay whole but for a few, and with them
    # what their tests share.
    spread = ["-n", str(ours.workers), "--dist", "worksteal"] if ours.workers > 1 else []
    runs = [pytest(f"beside each other, {ours.workers} workers", [*spread, "-m", f"{only}not alone", *theirs])]
    if runs[0].status in {OK, FAILED, NO_TESTS}:
        runs.append(pytest("alone, one by one", ["-m", f"{only}alone", *theirs]))
    status = status_of(runs, chosen=bool(only or theirs))
    print("=" * 20, "tests", "=" * 20)
    for run in runs:
        print(run)
    for line in (line for run in runs for line in run.ends):
        print(line)
    for name in (name for run in runs for name in run.failed):
        print("FAILED", name)
    print("all of it succeeded" if status == OK else f"it failed: exit status {status}")
    return status


if __name__ == "__main__":
    sys.exit(main())
