"""Tokens, keys and passwords: files with unsafe modes are refused or warned about, URLs are shown without passwords."""

from __future__ import annotations

import logging
import os
import re
import stat
import tempfile
from collections.abc import Sequence

from baton.config.files import MAX_BYTES, read_small_file
from baton.errors import ConfigError

log = logging.getLogger(__name__)

_LEAST_CHARACTERS = 16
_LEAST_DIFFERENT = 6
_PASSWORD = re.compile(r"://[^@]*:[^@]*@|[?&]password=")


def read_secret_file(
    path: str | os.PathLike[str], what: str, field: str, *, most: int = MAX_BYTES, pipes: bool = True
) -> bytes:
    """Read a file that only its owner should be able to read.

    As ``ssh`` does with keys, a file of this process's user is refused if group or others may read it. A file of
    another user (a secret that root keeps for a group) may be readable by its group; if all may read it, a warning is
    logged. A file that others than its owner may write is refused. File systems that are mounted read-only, such as the
    secrets of Kubernetes (0644 or 0444) and Docker, are exempt: a container has no other users, and the modes mean
    nothing there.

    Args:
        path: Path of the file.
        what: Description of the file, for messages.
        field: Name of the configuration field, for errors.
        most: Largest size in bytes.
        pipes: Whether it may be a pipe; see :func:`~baton.config.files.read_small_file`.

    Raises:
        ConfigError: The file cannot be read, is too long, or is open to others; says how to fix it.
    """
    return read_small_file(
        path, what, field, most=most, pipes=pipes, check=lambda fd: _require_private(fd, path, what, field)
    )


def file_stamp(path: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """Return what changes when a file is replaced, or its content or mode changes; ``None``: there is none."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino


def require_own_folder(folder: int | str | os.PathLike[str], shown: object, field: str) -> None:
    """Refuse a folder in which another user could replace files.

    Root's folders are accepted, also if root lets a group write to them, as Kubernetes' ``fsGroup`` does. Where new
    files of this process belong to another user (``root_squash`` of NFS), that user's folders are accepted.

    Args:
        folder: Descriptor or path.
        shown: Name of the folder in messages.
        field: Name of the configuration field, for errors.

    Raises:
        ConfigError: The folder belongs to another user, others may write to it, or it is a link to one.
        OSError: The folder's status cannot be read.
    """
    status = os.fstat(folder) if isinstance(folder, int) else os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{shown} is no folder", field=field)
    if status.st_uid not in (os.geteuid(), 0) and status.st_uid != _user_of_new_folders(folder):
        raise ConfigError(f"{shown} belongs to another user, who could change what is in it", field=field)
    mode = stat.S_IMODE(status.st_mode)
    if mode & (0o022 if status.st_uid else 0o002):
        raise ConfigError(
            f"others could change what is in {shown} (mode {mode:04o}): chmod 700, or name a new folder in it",
            field=field,
        )


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
