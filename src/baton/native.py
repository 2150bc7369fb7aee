"""Small helpers in C that lie beside the module which uses them, compiled once per process where a compiler is."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy.typing as npt

COMPILERS = ("cc", "gcc", "clang")


@functools.cache  # a loaded library stays loaded: the second user in a process needs no compiler
def load_helper(source: Path, compilers: tuple[str, ...] = COMPILERS) -> ctypes.CDLL | None:
    """Build a C file in a private directory that is gone when this returns; ``None``: it cannot be built here.

    The caller has a slower way in Python, and says in a metric or an attribute which one it uses. The first call for
    a file takes as long as the compiler does: services make it before they serve.

    Args:
        source: The file, e.g. ``Path(__file__).with_name("copying.c")``.
        compilers: The first of them that is there is used.
    """
    compiler = next((path for each in compilers if (path := shutil.which(each))), None)
    if compiler is None:
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="baton-native-") as folder:
            target = Path(folder) / f"{source.stem}.so"
            command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(target)]
            subprocess.run(command, check=True, capture_output=True, timeout=30)
            return ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError):
        return None  # no headers, no folder to write to, or a noexec one: there is a slower way


def address_of(array: npt.NDArray[Any]) -> int:
    """Return where an array's memory begins, in a third of the time that ``array.ctypes`` takes."""
    address: int = array.__array_interface__["data"][0]
    return address
