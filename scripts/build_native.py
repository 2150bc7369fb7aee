"""Builds the C helpers and the C++ operators for CPUs into the packages, where Python finds them.

Run by hand (or by ``make``) it builds in place what this processor runs best; ``--runnable`` adds the other instruction
sets that it can run, for their tests, and the wheel's build hook builds all. A library that was built from the same
sources with the same flags is left alone. Nothing is compiled at run time.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HELPERS = ROOT / "native"
OPERATORS = ROOT / "kernels/baton_kernels/cpu"
C_COMPILERS, CXX_COMPILERS = ("cc", "gcc", "clang"), ("g++", "clang++", "c++")
COMMON = ("-fPIC", "-Wall", "-Wextra")
C_FLAGS = (*COMMON, "-std=gnu11", "-O2")
CXX_FLAGS = (*COMMON, "-std=gnu++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-uninitialized")
SLOWEST = ("paged_attention.cpp", "quantized_pairs.cpp", "quantized_floats.cpp", "quantized_experts.cpp")
"""Sources that take longest to compile, longest first: they start before all others, or one core waits for them."""
TIMEOUT_S = 600.0
PORTABLE_GLIBC = "2.28"
"""What libraries ask for that the compiler from the package index builds."""


class BuildError(Exception):
    """A library cannot be built; says why in one line."""


@dataclass(frozen=True)
class Library:
    """A shared library.

    Attributes:
        target: Its file.
        language: ``"c"`` or ``"c++"``.
        sources: What is compiled.
        includes: What these include, as far as it is ours.
        flags: For the compiler.
        folder: Where the operators' sources are; ``None``: it has none.
        march: Architecture beyond the machine's least, as ``-march`` names it; ``features``: as ``-m`` names them.
    """

    target: Path
    language: str
    sources: tuple[Path, ...]
    includes: tuple[Path, ...]
    flags: tuple[str, ...]
    folder: Path | None = None
    march: str = ""
    features: tuple[str, ...] = ()

    def mark(self) -> bytes:
        """What stands in a file that was built from these sources."""
        digest = hashlib.sha256(repr((platform.machine(), self.flags, self.march, self.features)).encode())
        for path in (*self.sources, *self.includes):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        sources = "" if self.folder is None else _variants().sources_digest(self.folder)
        return f"baton-build:{digest.hexdigest()[:32]}-{sources}".encode()

    def is_current(self) -> bool:
        """Whether the file is there and built from these sources."""
        try:
            return self.mark() in self.target.read_bytes()
        except FileNotFoundError:
            return False


def libraries(scope: str) -> list[Library]:
    """Return what is built for this machine.

    Args:
        scope: ``"best"``: helpers, and operators for the best instruction set that this processor has; ``"runnable"``:
            operators for all that it has; ``"all"``: also for those that it has not.
    """
    helpers = Library(
        ROOT / "src/baton/_native/baton_native.so",
        "c",
        tuple(sorted(HELPERS.glob("*.c"))),
        (),
        C_FLAGS,
    )
    variants = _variants()
    wanted = variants.VARIANTS.get(platform.machine(), ()) if scope == "all" else variants.runnable_variants()
    if scope == "best":
        wanted = wanted[:1]
    sources, includes = (tuple(sorted((OPERATORS / "csrc").glob(pattern))) for pattern in ("**/*.cpp", "**/*.h"))
    mark = HELPERS / "build_mark.c"
    return [
        helpers,
        *(
            Library(
                OPERATORS / "lib" / each.file_name,
                "c++",
                (*sources, mark),
                includes,
                CXX_FLAGS,
                OPERATORS / "csrc",
                each.march,
                each.features,
            )
            for each in wanted
        ),
    ]


@functools.cache
def _variants():
    """Load the table of instruction sets without the package, which imports torch."""
    spec = importlib.util.spec_from_file_location("baton_cpu_variants", OPERATORS / "variants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Compilers:
    """Commands by language.

    Attributes:
        commands: For ``"c"`` and ``"c++"``.
        zig: Whether they are the package index's, which names processors its own way.
    """

    commands: dict[str, list[str]]
    zig: bool = False

    def target(self, library: Library) -> list[str]:
        """Return the flags for a library's instruction set."""
        if not library.march:
            return []
        arm = library.march.startswith("armv8")
        if not self.zig and arm:
            return ["-march=" + "+".join((library.march, *library.features))]
        if not self.zig:
            return [f"-march={library.march}", *(f"-m{each}" for each in library.features)]
        name = "generic" if arm else library.march
        return ["-mcpu=" + "+".join((name, *library.features)).replace("-", "_")]


def compilers() -> Compilers | None:
    """Return the system's compilers, else the package index's; ``None``: neither is there."""
    c, cxx = (next(filter(None, map(shutil.which, names)), None) for names in (C_COMPILERS, CXX_COMPILERS))
    if c and cxx:
        return Compilers({"c": [c], "c++": [cxx]})
    if importlib.util.find_spec("ziglang") is None:
        return None
    target = ["-target", f"{platform.machine()}-linux-gnu.{PORTABLE_GLIBC}"]
    zig = [sys.executable, "-m", "ziglang"]
    return Compilers({"c": [*zig, "cc", *target], "c++": [*zig, "c++", *target]}, zig=True)


def build(wanted: Iterable[Library], progress: bool = False) -> list[Library]:
    """Build what is not current; returns what was built.

    Args:
        wanted: Libraries.
        progress: Print how many files are compiled.

    Raises:
        BuildError: There is no compiler, or it fails.
    """
    stale = [library for library in wanted if not library.is_current()]
    if not stale:
        return []
    tools = compilers()
    if tools is None:
        raise BuildError(f"no C and C++ compiler: install g++, or run: {sys.executable} -m pip install ziglang")
    with tempfile.TemporaryDirectory(prefix="baton-build-") as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        for at, library in enumerate(stale):
            library.target.parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / str(at)).mkdir()
        jobs = [
            (tools, library, source, Path(folder) / str(at) / f"{number}-{source.stem}.o")
            for at, library in enumerate(stale)
            for number, source in enumerate(library.sources)
        ]
        jobs.sort(key=lambda job: SLOWEST.index(job[2].name) if job[2].name in SLOWEST else len(SLOWEST))
        if progress:
            names = ", ".join(library.target.stem for library in stale)
            print(f"compiling {names}: {len(jobs)} files, about a minute per library, once", flush=True)
        running = [pool.submit(_compile, *job) for job in jobs]
        for done, future in enumerate(as_completed(running), 1):
            future.result()
            if progress and (done % 8 == 0 or done == len(jobs)):
                print(f"compiled {done} of {len(jobs)} files", flush=True)
        for at, library in enumerate(stale):
            _link(tools, library, sorted((Path(folder) / str(at)).glob("*.o")))
    return stale


def _compile(tools: Compilers, library: Library, source: Path, to: Path) -> None:
    language = "c" if source.suffix == ".c" else "c++"
    flags = library.flags if language == library.language else COMMON
    define = f'-DBATON_DIGEST="{library.mark().decode().removeprefix("baton-build:")}"'
    target = [*tools.target(library), "-Wno-unknown-warning-option"]  # clang does not know all of GCC's
    _run([*tools.commands[language], *flags, *target, define, "-c", str(source), "-o", str(to)])


def _link(tools: Compilers, library: Library, objects: Sequence[Path]) -> None:
    # Beside the target, so that it can be put in its place in one step: never is half a library there.
    made = library.target.with_suffix(f".{os.getpid()}.tmp")
    try:
        flags = [*tools.target(library), "-shared", "-s", "-Wl,-Bsymbolic"]
        _run([*tools.commands[library.language], *flags, *map(str, objects), "-lm", "-o", str(made)])
        os.replace(made, library.target)
    finally:
        made.unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
    sys.stderr.write(done.stderr)  # warnings


def main() -> int:
    """Build in place, or say what is not current."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runnable", action="store_true", help="for all instruction sets that this processor has")
    parser.add_argument("--all", action="store_true", help="also for instruction sets that this processor has not")
    parser.add_argument("--progress", action="store_true", help="print how many files are compiled")
    parser.add_argument("--check", action="store_true", help="build nothing; fail if something has to be built")
    parser.add_argument("--has-compilers", action="store_true", help="build nothing; fail if there is no compiler")
    args = parser.parse_args()
    if args.has_compilers:
        return int(compilers() is None)
    wanted = libraries("all" if args.all else "runnable" if args.runnable else "best")
    if args.check:
        stale = [library.target.name for library in wanted if not library.is_current()]
        if stale:
            print(f"not built, or from older sources: {', '.join(stale)}; run: python scripts/build_native.py")
        return int(bool(stale))
    try:
        built = build(wanted, args.progress)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    for library in built:
        print(f"built {library.target.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
