"""Builds the targets of native code: the product's own sources with AddressSanitizer and UndefinedBehaviorSanitizer.

With Clang they are led by libFuzzer, which looks for inputs that reach new code; GCC's, for the short run of ``make
test``, take seeded random ones. Both replay files.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).with_name("native")
BUILT = ROOT / "build/fuzz"
HELPERS = ("table", "hashing", "blocks", "mover")
OPERATORS = ("operators", "mixtures", "quantized")
TARGETS = (*HELPERS, *OPERATORS)
SANITIZE = ("-g1", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FAST_TO_BUILD = ("-fno-sanitize=null,object-size", "--param", "asan-instrumentation-with-call-threshold=0")
"""For GCC and short runs: each check is a call, and those that AddressSanitizer's find too are left out. Operators are
compiled in 115 s of processor time instead of 190, and run 0.4 to 0.5 as many inputs in a second."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "UBSAN_OPTIONS": "print_stacktrace=1"}
"""Operators run in teams of two threads."""


class NoCompilerError(Exception):
    """There is no compiler that has the sanitizers; says what to install."""


@functools.cache
def _builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("baton_build_native", ROOT / "scripts/build_native.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def compilers(*, guided: bool) -> tuple[str, str]:
    """Return a C and a C++ compiler that make programs with sanitizers, ``guided``: with libFuzzer.

    Raises:
        NoCompilerError: There is none.
    """
    pairs = [("clang", "clang++"), *((f"clang-{n}", f"clang++-{n}") for n in range(22, 13, -1))]
    for c, cxx in pairs if guided else [("gcc", "g++"), *pairs]:
        if shutil.which(c) and shutil.which(cxx) and _works(cxx, guided=guided):
            return c, cxx
    if guided:
        raise NoCompilerError("no Clang with libFuzzer; on Debian as root: apt-get install clang libclang-rt-dev")
    raise NoCompilerError("no compiler with AddressSanitizer; on Debian as root: apt-get install g++")


def _works(cxx: str, *, guided: bool) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text('extern "C" int LLVMFuzzerTestOneInput(const unsigned char *, unsigned long) { return 0; }\n')
        if not guided:
            source.write_text("int main() { return 0; }\n")
        command = [cxx, *_flags(cxx, guided=guided), str(source), "-o", str(Path(folder) / "probe")]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _flags(compiler: str, *, guided: bool) -> tuple[str, ...]:
    if guided:
        return (*SANITIZE, "-fsanitize=fuzzer")
    return (*SANITIZE, *(FAST_TO_BUILD if compiler.startswith("g++") else ()))


def build(targets: Sequence[str], *, guided: bool) -> dict[str, Path]:
    """Build what is not built from these very sources; returns the programs.

    Raises:
        NoCompilerError: See :func:`compilers`.
        RuntimeError: A compiler fails; has what it says.
    """
    tools, builder = compilers(guided=guided), _builder()
    helpers, best, *_ = builder.libraries("best")
    programs: dict[str, Path] = {}
    for target in targets:
        library = best if target in OPERATORS else helpers
        includes = sorted({path.parent for path in library.includes} | {SOURCES, builder.HELPERS})
        flags = [*_flags(tools[1], guided=guided), *(f"-I{each}" for each in includes)]
        flags += ['-DBATON_DIGEST="fuzz"', *builder.Compilers({}).target(library)]
        mark = hashlib.sha256(repr((tools, flags)).encode() + library.mark()).hexdigest()[:16]
        ours = [SOURCES / f"{target}.cpp", *([] if guided else [SOURCES / "main.cpp"])]
        read = (*ours, *sorted(SOURCES.glob("*.h")))
        digest = hashlib.sha256(b"".join(each.read_bytes() for each in read)).hexdigest()
        programs[target] = BUILT / f"{library.language}-{mark}" / f"{target}-{digest[:16]}"
        if programs[target].exists():
            continue
        folder = programs[target].parent / "objects"
        folder.mkdir(parents=True, exist_ok=True)
        theirs = {
            source: [*flags, "-w", "-std=gnu11" if source.suffix == ".c" else "-std=gnu++17"]
            for source in library.sources
            if not (folder / f"{source.name}.o").exists()
        }
        objects = [str(folder / f"{source.name}.o") for source in (*library.sources, *ours)]
        jobs = {**theirs, **{source: [*flags, "-Wall", "-Wextra", "-std=c++20"] for source in ours}}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: _compile(tools, job, folder), jobs.items()))  # noqa: B023  runs to its end here
        openmp = ["-l:libgomp.so.1"] if target in OPERATORS else []
        _run([tools[1], *_flags(tools[1], guided=guided), *objects, *openmp, "-o", str(programs[target])])
    return programs


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a target to its end."""
    environment = {**os.environ, **_ENVIRONMENT}
    return subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)


def _compile(tools: tuple[str, str], job: tuple[Path, list[str]], folder: Path) -> None:
    source, flags = job
    made, ending = folder / f"{source.name}.o", f".{os.getpid()}"
    _run([tools[source.suffix != ".c"], *flags, "-c", str(source), "-o", f"{made}{ending}"])
    os.replace(f"{made}{ending}", made)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
