"""Tokens, keys and passwords: files with unsafe modes are refused or warned about, URLs are shown without passwords."""

from __future__ import annotations

import errno
import logging
import os
import re
import select
import stat
import tempfile
import time
from collections.abc import Sequence
from typing import BinaryIO

from baton.errors import ConfigError

log = logging.getLogger(__name__)

_LEAST_CHARACTERS = 16
_LEAST_DIFFERENT = 6
MAX_SECRET_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
_PIPE_S = 10.0
"""Seconds in which the writer of a pipe (``/dev/stdin``, ``<(command)``) has to end."""
_PASSWORD = re.compile(r"://[^@]*:[^@]*@|[?&]password=")


def read_secret_file(path: str | os.PathLike[str], what: str, field: str, *, most: int = MAX_SECRET_BYTES) -> bytes:
    """Read a file that only its owner should be able to read.

    As ``ssh`` does with keys, a file of this process's user is refused if group or others may read it. A file of
    another user (a secret that root keeps for a group) may be readable by its group; if all may read it, a warning is
    logged. A file that others than its owner may write is refused. File systems that are mounted read-only, such as the
    secrets of Kubernetes (0644 or 0444) and Docker, are exempt: a container has no other users, and the modes mean
    nothing there. A pipe without a writer counts as empty; it is not waited for.

    Args:
        path: Path of the file.
        what: Description of the file, for messages.
        field: Name of the configuration field, for errors.
        most: Largest size in bytes.

    Raises:
        ConfigError: The file cannot be read, is too long, or is open to others; says how to fix it.
    """
    try:
        with open_ready(path) as file:
            _require_private(file.fileno(), path, what, field)
            data = read_ready(file, most + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {what} {os.fspath(path)}: {error.strerror}", field=field) from error
    if len(data) > most:
        raise ConfigError(f"{what} {os.fspath(path)} is longer than {most} bytes", field=field)
    return data


def open_ready(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for :func:`read_ready`; a pipe without a writer counts as empty and is not waited for.

    Raises:
        OSError: The file cannot be opened.
    """
    return open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0)


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


def file_stamp(path: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """Return what changes when a file is replaced, or its content or mode changes; ``None``: there is none."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino


def require_own_folder(folder: int | str | os.PathLike[str], shown: object, field: str) -> None:
    """Refuse a folder of another user, who could replace its files; root's folders are accepted.

    Where new files of this process belong to another user (``root_squash`` of NFS), that user's folders are accepted.

    Args:
        folder: Descriptor or path.
        shown: Name of the folder in messages.
        field: Name of the configuration field, for errors.

    Raises:
        ConfigError: The folder belongs to another user, or is no folder but, say, a link to one.
        OSError: The folder's status cannot be read.
    """
    status = os.fstat(folder) if isinstance(folder, int) else os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{shown} is no folder", field=field)
    if status.st_uid not in (os.geteuid(), 0) and status.st_uid != _user_of_new_folders(folder):
        raise ConfigError(f"{shown} belongs to another user, who could change what is in it", field=field)


def _user_of_new_folders(beside: int | str | os.PathLike[str]) -> int:
    path = f"/proc/self/fd/{beside}" if isinstance(beside, int) else os.fspath(beside)
    with tempfile.TemporaryDirectory(prefix=".baton-", dir=path) as made:
        return os.stat(made).st_uid


def shown_url(url: str) -> str:
    """Return a URL without user, password and query, for logs and traces."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    beyond = rest.rpartition("@")[2]
    if "?" in rest.removesuffix(beyond):  # an option with @, or a password with a question mark
        beyond = "..."
    return f"{scheme}{separator}{beyond.partition('?')[0]}"


def flags_with_passwords(words: Sequence[str]) -> list[str]:
    """Return the flags of a command line whose values are URLs with passwords, ``--redis`` for one."""
    flags = []
    for before, word in zip(("", *words), words, strict=False):
        if _PASSWORD.search(word):
            flag = word if word.startswith("--") and "=" in word else before
            flags.append(flag.partition("=")[0] if flag.startswith("--") else "an argument")
    return flags


def _require_private(fd: int, path: str | os.PathLike[str], what: str, field: str) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        return
    name = os.fspath(path)
    mode = stat.S_IMODE(status.st_mode)
    own = status.st_uid == os.geteuid()
    if mode & 0o022 or (own and mode & 0o077):
        can = "write" if mode & 0o022 else "read"
        raise ConfigError(
            f"others than its owner can {can} {what} {name} (mode {mode:04o}): chmod 600 {name}", field=field
        )
    if mode & 0o004:
        log.warning("all users of this host can read %s %s (mode %04o)", what, name, mode)


def require_unguessable(secret: str | bytes, what: str, field: str) -> None:
    """Check that a secret is long and has several different characters.

    Args:
        secret: The secret.
        what: Description of the secret, for messages.
        field: Name of the configuration field, for errors.

    Raises:
        ConfigError: It could be guessed.
    """
    if len(secret) < _LEAST_CHARACTERS or len(set(secret)) < _LEAST_DIFFERENT:
        raise ConfigError(
            f"{what} can be guessed: it has {len(secret)} characters, {len(set(secret))} different ones, "
            f"of which {_LEAST_CHARACTERS} and {_LEAST_DIFFERENT} are the least; "
            "head -c 32 /dev/urandom | base64 makes one that cannot",
            field=field,
        )
