"""Writes ``requirements/*.txt``: what Baton needs, in the versions of ``constraints.txt``, every file by its hash.

``make lock`` runs it, by uv. The hashes are those of all files of a release, so that one list serves every platform and
Python; they are what the package index says, so read what changes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
SETS: dict[str, tuple[str, ...]] = {
    "base": (),
    "otel": ("otel",),
    "engine": ("otel", "engine", "nixl"),
    "dev": ("dev",),
}
"""By file the extras; each file has what those before it have not."""
OWN = ("build", "docs", "fuzz", "tools")
"""Environments of their own, each from what its ``.in`` asks for."""
FREE = ("scan",)
"""Likewise, but not in the versions of ``constraints.txt``: what they run does not work with those."""
CUDA = re.compile(r"(nvidia|cuda)-|triton$")
"""What only torch's build for CUDA needs."""
HEAD = "# Made by `make lock` from {source}; do not edit.\n"


def entries(text: str) -> dict[str, str]:
    """Return the entries of a requirements file by name, each with its hashes."""
    blocks = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    return {re.split(r"[=\s;\[]", block, maxsplit=1)[0]: block.rstrip() + "\n" for block in blocks}


def resolve(uv: str, source: str, extras: tuple[str, ...] = (), *, free: bool = False) -> dict[str, str]:
    """Return what uv resolves for all platforms and all Pythons that Baton runs with."""
    command = [uv, "pip", "compile", source, "--universal", "--python-version", "3.11", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--quiet"]
    command += [] if free else ["--constraints", "constraints.txt"]
    command += [word for extra in extras for word in ("--extra", extra)]
    return entries(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def write(name: str, source: str, found: dict[str, str]) -> None:
    """Write a file."""
    text = HEAD.format(source=source) + "".join(found[each] for each in sorted(found))
    (FOLDER / f"{name}.txt").write_text(text)


def main() -> int:
    """Resolve and write everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--uv", default="uv", help="the program")
    args = parser.parse_args()
    project = "pyproject.toml and constraints.txt"
    known: dict[str, str] = {}
    try:
        for name, extras in SETS.items():
            found = resolve(args.uv, "pyproject.toml", extras)
            write(
                name, project, {each: block for each, block in found.items() if each not in known and not _apart(each)}
            )
            known |= found
        write("cuda", project, {each: block for each, block in known.items() if CUDA.match(each)})
        write("triton", project, {"triton": known["triton"]})  # alone, for its interpreter beside a torch without CUDA
        (cpu,) = [line for line in (FOLDER / "torch-cpu.in").read_text().splitlines() if not line.startswith("#")]
        write("torch", f"{project}, and torch-cpu.in", {"torch": known["torch"].rstrip() + f" \\\n    {cpu}\n"})
        for name in OWN:
            write(name, f"{name}.in and constraints.txt", resolve(args.uv, f"requirements/{name}.in"))
        build = entries((FOLDER / "build.txt").read_text())
        write("hatchling", "build.in and constraints.txt", {each: build[each] for each in build if each != "ziglang"})
        for name in FREE:
            write(name, f"{name}.in", resolve(args.uv, f"requirements/{name}.in", free=True))
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        return 1
    return 0


def _apart(name: str) -> bool:
    return name == "torch" or CUDA.match(name) is not None


if __name__ == "__main__":
    sys.exit(main())
