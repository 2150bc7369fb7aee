"""Tokens, keys and passwords: files that others can read are told of or refused, URLs are shown without passwords."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Sequence

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

    Args:
        path: The file.
        what: What to call it in messages.
        field: Of the configuration.
        most: Bytes that it may have.

    Raises:
        ConfigError: It cannot be read, is too long, or is open to others; says what to do.
    """
    try:
        with open(path, "rb") as file:
            _require_private(file.fileno(), path, what, field)
            data = file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {what} {os.fspath(path)}: {error.strerror}", field=field) from error
    if len(data) > most:
        raise ConfigError(f"{what} {os.fspath(path)} is longer than {most} bytes", field=field)
    return data


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
