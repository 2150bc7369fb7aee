"""Fuzzes what reads foreign bytes, and native code: ``python -m tests.fuzz.run --seconds 600``.

Each target runs alone, led by coverage (libFuzzer; atheris for Python), for so many seconds. Inputs that reached what
is new are kept under ``build/fuzz/corpus``; those that a target fails on go into ``tests/fuzz/crashes``, where ``make
test`` replays them.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.fuzz import native_targets
from tests.fuzz.python_targets import TARGETS as PYTHON_TARGETS

HERE = Path(__file__).parent
LOG, CRASHES = HERE / "log.jsonl", HERE / "crashes"
CORPUS = native_targets.BUILT / "corpus"
TARGETS = (*PYTHON_TARGETS, *native_targets.TARGETS)
LONGEST_INPUT = 4096
MOST_MB = 2048


def version() -> str:
    """Return the commit, ``-dirty`` if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def commands(targets: list[str]) -> dict[str, list[str]]:
    """Return the commands that run targets, those of native code built.

    Raises:
        native_targets.NoCompilerError: There is none with libFuzzer.
        ImportError: There is no atheris.
    """
    native = [each for each in targets if each in native_targets.TARGETS]
    built = native_targets.build(native, guided=True) if native else {}
    if len(native) < len(targets):
        import atheris  # noqa: F401  of an environment of its own
    python = [sys.executable, "-m", "tests.fuzz.python_child"]
    return {each: [str(built[each])] if each in built else [*python, each] for each in targets}


def fuzz(target: str, command: list[str], seconds: int, longest_s: int) -> dict[str, Any]:
    """Run one target; returns its line of the log, but for the version."""
    corpus, crashes = CORPUS / target, CRASHES / target
    corpus.mkdir(parents=True, exist_ok=True)
    crashes.mkdir(parents=True, exist_ok=True)
    known = set(crashes.iterdir())
    flags = [f"-max_total_time={seconds}", f"-max_len={LONGEST_INPUT}", f"-timeout={longest_s}"]
    flags += [f"-report_slow_units={longest_s}", f"-rss_limit_mb={MOST_MB}", "-print_final_stats=1"]
    flags += [f"-artifact_prefix={crashes}/"]
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = native_targets.run([*command, *flags, str(corpus), str(crashes)])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = sorted(each.name for each in set(crashes.iterdir()) - known)
    if done.returncode:
        print(done.stderr[-6000:], file=sys.stderr)
    runs = re.search(r"stat::number_of_executed_units: (\d+)", done.stderr)
    reached = re.findall(r"cov: (\d+)", done.stderr)
    if not any(crashes.iterdir()):
        crashes.rmdir()
    return {
        "target": target,
        "seconds": round(time.monotonic() - begun),
        "cpu_s": round(sum(after[:2]) - sum(before[:2])),
        "runs": int(runs[1]) if runs else 0,
        "coverage": int(reached[-1]) if reached else 0,
        "found": found or ([f"exit status {done.returncode}"] if done.returncode else []),
    }


def main() -> int:
    """Run targets one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=600, help="per target")
    parser.add_argument("--targets", default="", help=f"some of {','.join(TARGETS)}, separated by commas; none: all")
    parser.add_argument("--hang-s", type=int, default=120, help="longest that an input may take")
    parser.add_argument("--log", action="store_true", help=f"add a line per target to {LOG.relative_to(Path.cwd())}")
    args = parser.parse_args()
    targets = [each for each in args.targets.split(",") if each] or list(TARGETS)
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    try:
        by_target = commands(targets)
    except (native_targets.NoCompilerError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    failed, code = False, version()  # before the log changes
    for target, command in by_target.items():
        line = {"version": code, **fuzz(target, command, args.seconds, args.hang_s)}
        failed |= bool(line["found"])
        print(json.dumps(line), flush=True)
        if args.log:
            with LOG.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
