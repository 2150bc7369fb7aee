"""Small helpers in C that lie beside the module which uses them, compiled once per machine where a compiler is."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy.typing as npt

from baton.config.paths import cache_dir

log = logging.getLogger(__name__)

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O2", "-shared", "-fPIC")


@functools.cache  # a loaded library stays loaded
def load_helper(source: Path, compilers: tuple[str, ...] = COMPILERS) -> ctypes.CDLL | None:
    """Load a C file, from the cache folder if it was built before; ``None``: it cannot be built here.

    The caller has a slower way in Python, and says in a metric or an attribute which one it uses. The first call for
    a file on a machine takes as long as the compiler does: services make it before they serve.

    Args:
        source: The file, e.g. ``Path(__file__).with_name("block_copy.c")``; headers of its own lie beside it.
        compilers: The first of them that is there is used.
    """
    compiler = next((path for each in compilers if (path := shutil.which(each))), None)
    if compiler is None:
        return None
    for load in (_load_kept, _load_once):
        try:
            return load(source, compiler)
        except subprocess.SubprocessError:
            return None  # no headers: there is a slower way
        except OSError as error:  # no folder to write to, not ours alone, or a noexec one
            log.debug("%s: %s", source.name, error)
    return None


def _load_kept(source: Path, compiler: str) -> ctypes.CDLL:
    """Load from the cache folder, after building what it lacks.

    Raises:
        OSError: It cannot be used, or others could have written into it.
        SubprocessError: It does not compile.
    """
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is not this user's alone")
    library = folder / f"{source.stem}-{_key(source, compiler)}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as private:
            os.replace(_compile(source, compiler, Path(private)), library)  # whole, or not there
    return ctypes.CDLL(str(library))


def _load_once(source: Path, compiler: str) -> ctypes.CDLL:
    """Build and load in a private folder that is gone when this returns."""
    with tempfile.TemporaryDirectory(prefix="baton-native-") as folder:
        return ctypes.CDLL(str(_compile(source, compiler, Path(folder))))


def _key(source: Path, compiler: str) -> str:
    """Digest of everything that decides the library."""
    tool = Path(compiler).stat()
    digest = hashlib.sha256(repr((compiler, tool.st_size, tool.st_mtime_ns, FLAGS, platform.machine())).encode())
    for part in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(part.name.encode() + b"\0" + part.read_bytes())
    return digest.hexdigest()[:20]


def _compile(source: Path, compiler: str, folder: Path) -> Path:
    target = folder / f"{source.stem}.so"
    command = [compiler, *FLAGS, str(source), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return target


def address_of(array: npt.NDArray[Any]) -> int:
    """Return where an array's memory begins, in a third of the time that ``array.ctypes`` takes."""
    address: int = array.__array_interface__["data"][0]
    return address
