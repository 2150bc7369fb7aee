"""Reading files that configuration names, without waiting for what else stands in their place."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from collections.abc import Callable
from typing import BinaryIO

from baton.errors import ConfigError

MAX_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
_PIPE_S = 10.0
"""Seconds in which the writer of a pipe (``/dev/stdin``, ``<(command)``) has to end."""


def read_small_file(
    path: str | os.PathLike[str],
    what: str,
    field: str,
    *,
    most: int = MAX_BYTES,
    pipes: bool = False,
    check: Callable[[int], object] | None = None,
) -> bytes:
    """Read a file.

    Args:
        path: Path of the file.
        what: Description of the file, for messages.
        field: Name of the configuration field, for errors.
        most: Largest size in bytes.
        pipes: Whether it may be a pipe, which has to end within seconds; one without a writer counts as empty.
        check: Is called with the open file's descriptor before it is read.

    Raises:
        ConfigError: It cannot be read, is no regular file, or is too long.
    """
    try:
        with open_ready(path) if pipes else open_regular(path) as file:
            if check is not None:
                check(file.fileno())
            data = read_ready(file, most + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {what} {os.fspath(path)}: {error.strerror}", field=field) from error
    if len(data) > most:
        raise ConfigError(f"{what} {os.fspath(path)} is longer than {most} bytes", field=field)
    return data


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading, without a buffer; a pipe, a device or a folder in its place is not waited for.

    Raises:
        OSError: It cannot be opened, or is no regular file.
    """
    file = open_ready(path)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file")
    return file


def open_ready(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for :func:`read_ready`; a pipe without a writer counts as empty and is not waited for.

    Raises:
        OSError: The file cannot be opened.
    """
    return open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_ready(file: BinaryIO, most: int) -> bytes:
    """Return the content of a file from :func:`open_ready`, ``most`` bytes at most; a pipe has to end within seconds.

    Raises:
        OSError: It cannot be read, or does not end.
    """
    fd = file.fileno()
    data = bytearray()
    ends_at = time.monotonic() + _PIPE_S
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    while len(data) < most:
        try:
            piece = os.read(fd, min(most - len(data), _PIECE_BYTES))
        except BlockingIOError:  # a pipe, whose writer has more to say
            if waiting.poll(1000 * max(0.0, ends_at - time.monotonic())):
                continue
            why = f"it is no file, and what writes to it did not end within {_PIPE_S:g} s"
            raise OSError(errno.ETIMEDOUT, why) from None
        if not piece:
            break
        data += piece
    return bytes(data)
