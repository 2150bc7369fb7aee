"""The inner loop: checks what changed since a commit, and runs the unit tests of the packages it is in.

``make quick`` runs it: ruff, import contracts, mypy, then the tests. Changed are files that differ from ``--since``
(default: the last commit), and new ones. Tests that need more than seconds are for ``make check`` and ``make test``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
UNIT = Path("tests/unit")
OWNERS = {
    "services/router/baton_router": UNIT / "router",
    "services/kvstore/baton_kvstore": UNIT / "kvstore",
    "kernels/baton_kernels": Path("tests/kernels"),
    "src/baton_bench": UNIT / "bench",
    "src/baton": UNIT,
}
"""By folder of code the folder that its tests are in, each package's in one of its name."""


def list_changed(since: str) -> list[str]:
    """Return the files that differ from a commit, and new ones, that are still there."""
    commands = (["git", "diff", "--name-only", since], ["git", "ls-files", "--others", "--exclude-standard"])
    outputs = [subprocess.run(each, cwd=ROOT, check=True, capture_output=True, text=True).stdout for each in commands]
    return sorted(path for output in outputs for path in output.splitlines() if (ROOT / path).exists())


def find_tests(path: str) -> Path | None:
    """Return the tests of a changed file: itself, the folder named like its package, or its owner's."""
    if path.startswith("tests/"):
        is_unit = path.startswith((f"{UNIT}/", "tests/kernels/")) and Path(path).name.startswith("test_")
        return Path(path) if is_unit else None
    for code, tests in OWNERS.items():
        if path.startswith(f"{code}/"):
            package = tests / Path(path).relative_to(code).parts[0].removesuffix(".py")
            fallback = UNIT / "core" if tests == UNIT else tests
            return next((each for each in (package, fallback) if (ROOT / each).is_dir()), None)
    return None


def main() -> int:
    """Run the checks one after the other; the exit status is that of the first that fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--since", default="HEAD", help="commit to compare with")
    args = parser.parse_args()
    changed = list_changed(args.since)
    modules = [path for path in changed if path.endswith((".py", ".pyi"))]
    tests = sorted({str(folder) for folder in map(find_tests, changed) if folder is not None})
    if not changed:
        print(f"nothing changed since {args.since}")
        return 0
    steps: list[list[str]] = []
    if modules:
        steps += [["ruff", "check", *modules], ["ruff", "format", "--check", *modules]]
        steps += [["lint-imports"], ["python", "scripts/check_names.py", *modules], ["mypy"]]
    if tests:
        steps.append(["python", "-m", "pytest", "-q", "-x", "-n", "2", "-m", "not thorough and not alone", *tests])
    for step in steps:
        begun = time.monotonic()
        done = subprocess.run([str(BIN / step[0]), *step[1:]], cwd=ROOT, check=False)
        print(
            f"{step[0] if step[0] != 'python' else ' '.join(step[1:3])}: {time.monotonic() - begun:.1f} s", flush=True
        )
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
