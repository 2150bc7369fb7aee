"""Tokens, keys and passwords: files that others can read are told of or refused, URLs are shown without passwords."""

from __future__ import annotations

import logging
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from typing import BinaryIO

from baton.errors import ConfigError

log = logging.getLogger(__name__)

MAX_SECRET_BYTES = 1 << 20
_PASSWORD = re.compile(r"://[^@]*:[^@]*@|[?&]password=")


def read_secret_file(path: str | os.PathLike[str], what: str, field: str, *, most: int = MAX_SECRET_BYTES) -> bytes:
    """Read a file that should be its owner's alone.

    As ``ssh`` does with keys, a file of this process's user is refused if group or others may read it; one of another
    user (a secret that root keeps for a group) may be read by its group, and is warned of if all may read it. What
    others than its owner may write is refused. Not so on file systems that are mounted read-only here, such as the
    secrets of Kubernetes (0644 or 0444) and Docker: nobody else is in the container, and their modes say nothing.
    A pipe that nobody writes into is empty, and not waited for.

    Args:
        path: The file.
        what: What to call it in messages.
        field: Of the configuration.
        most: Bytes that it may have.

    Raises:
        ConfigError: It cannot be read, is too long, or is open to others; says what to do.
    """
    try:
        with open_ready(path) as file:
            _require_private(file.fileno(), path, what, field)
            data = file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {what} {os.fspath(path)}: {error.strerror}", field=field) from error
    if len(data) > most:
        raise ConfigError(f"{what} {os.fspath(path)} is longer than {most} bytes", field=field)
    return data


def open_ready(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading; a pipe that nobody writes into is empty, and not waited for.

    Raises:
        OSError: It cannot be opened.
    """
    file = open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")  # noqa: SIM115 (the caller closes it)
    os.set_blocking(file.fileno(), True)
    return file


def require_own_folder(folder: int | str | os.PathLike[str], shown: object, field: str) -> None:
    """Refuse a folder of another user, who could exchange what is written there; root's is as good as one's own.

    Where files of this process belong to somebody else (``root_squash`` of NFS), folders may, too.

    Args:
        folder: Descriptor or path.
        shown: What to call it.
        field: Of the configuration.

    Raises:
        ConfigError: It is another user's, or no folder but a link to one.
        OSError: It cannot be looked at.
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
    """Return a URL without user, password and options, for logs and traces."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    beyond = rest.rpartition("@")[2]
    if "?" in rest.removesuffix(beyond):  # an option with @, or a password with a question mark
        beyond = "..."
    return f"{scheme}{separator}{beyond.partition('?')[0]}"


def flags_with_passwords(words: Sequence[str]) -> list[str]:
    """Return the flags of a command line whose values are URLs with passwords, ``--redis`` for one."""
    found = []
    for before, word in zip(("", *words), words, strict=False):
        if _PASSWORD.search(word):
            flag = word if word.startswith("--") and "=" in word else before
            found.append(flag.partition("=")[0] if flag.startswith("--") else "an argument")
    return found


def _require_private(fd: int, path: str | os.PathLike[str], what: str, field: str) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        return
    name, mode, mine = os.fspath(path), stat.S_IMODE(status.st_mode), status.st_uid == os.geteuid()
    if mode & 0o022 or (mine and mode & 0o077):
        can = "write" if mode & 0o022 else "read"
        raise ConfigError(
            f"others than its owner can {can} {what} {name} (mode {mode:04o}): chmod 600 {name}", field=field
        )
    if mode & 0o004:
        log.warning("everybody on this host can read %s %s (mode %04o)", what, name, mode)
