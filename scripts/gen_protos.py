"""Generate ``src/baton/api/v1`` from ``protos/``; with ``--check`` only compare and fail on a difference."""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TARGET = ROOT / "src"
PACKAGE = Path("baton/api/v1")


def generate(out: Path) -> None:
    """Run protoc with the Python, gRPC and mypy plugins; files land in ``out/baton/api/v1``."""
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.rglob("*.proto"))
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}"]
    command += [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    subprocess.run([*command, *files], check=True, env=env, cwd=PROTOS)


def differences(fresh: Path) -> list[str]:
    """Return the generated files that are missing, stale or left over in the source tree."""
    new = {p.name for p in (fresh / PACKAGE).iterdir()}
    old = {p.name for p in (TARGET / PACKAGE).iterdir() if "_pb2" in p.name}
    stale = [n for n in new & old if not filecmp.cmp(fresh / PACKAGE / n, TARGET / PACKAGE / n, shallow=False)]
    return sorted(stale + list(new ^ old))


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the committed code is not up to date")
    if not parser.parse_args().check:
        generate(TARGET)
        return 0
    with tempfile.TemporaryDirectory() as tmp:
        generate(Path(tmp))
        stale = differences(Path(tmp))
    if stale:
        print("generated code is out of date, run `make protos`:", ", ".join(stale), file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
