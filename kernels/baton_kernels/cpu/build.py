"""Compiles the C++ operators into a cache folder, once per machine type, source and compiler.

No torch headers are used: a few seconds of compiling, and no tie to torch's version. The library leaves OpenMP's
symbols open; they are bound to the OpenMP that torch has loaded, so that there is one thread pool and not two.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-std=gnu++17", "-O3", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=default")
BUILD_SECONDS = 300.0
POLL_SECONDS = 0.05


class BuildError(RuntimeError):
    """The operators cannot be compiled here; says why in one line."""


def build_library(cache_dir: Path, *, link_openmp: bool, target: str = "native") -> Path:
    """Return the compiled library, building it unless the cache has it.

    Args:
        cache_dir: Made if it does not exist, for its owner alone.
        link_openmp: Link the compiler's own OpenMP, where torch brings none that could be used.
        target: Architecture to compile for, as the compiler's ``-march`` names it.

    Raises:
        BuildError: No compiler, the cache cannot be written to, or compiling failed or took too long.
    """
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({', '.join(COMPILERS)})")
    command = [compiler, *FLAGS, _target_flag(target)]
    library = cache_dir / f"baton_cpu-{_key(command, link_openmp)}.so"
    if library.exists():
        return library
    try:
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                _compile(command, library, link_openmp)
    except OSError as error:
        raise BuildError(f"cannot write to {cache_dir} ({error.strerror})") from error
    return library


def _target_flag(target: str) -> str:
    return f"-march={target}" if platform.machine() in {"x86_64", "AMD64"} else f"-mcpu={target}"


def _key(command: list[str], link_openmp: bool) -> str:
    """Digest of everything that decides the library: sources, compiler, flags, processor."""
    digest = hashlib.sha256(repr((command, link_openmp, platform.machine(), _cpu_flags())).encode())
    digest.update(subprocess.run([command[0], "--version"], capture_output=True, timeout=30, check=False).stdout)
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in {".cpp", ".h"}:
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, waiting at most as long as a build may take."""
    deadline = time.monotonic() + BUILD_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(f"another process has been building {path.stem} for too long") from None
                time.sleep(POLL_SECONDS)  # flock knows no deadline, and an alarm belongs to the main thread alone
        yield


def _compile(command: list[str], library: Path, link_openmp: bool) -> None:
    """Compile into a temporary folder beside the library and move the result in one step."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = []
        for source in sorted(SOURCES.glob("*.cpp")):
            objects.append(str(Path(folder) / f"{source.stem}.o"))
            _run([*command, "-c", str(source), "-o", objects[-1]])
        output = str(Path(folder) / library.name)
        _run([command[0], "-shared", *objects, "-o", output, *(["-fopenmp"] if link_openmp else [])])
        os.replace(output, library)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {BUILD_SECONDS:g} s") from error
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise BuildError(f"{command[0]} failed: {first}")
