"""The directory of a disk tier: locked, recognized by a file of its own, and never left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator

from baton.errors import ConfigError
from baton_kvstore.tiers.disk.format import VERSION, decode_store, encode_store

_STORE = "store"
_LOCK = "lock"
_CHECKPOINT = "index"
_MAX_CHECKPOINT = 1 << 32
_SEGMENT = re.compile(r"segment-([0-9a-f]{16})")
_MODE = 0o600
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


class Directory:
    """Opens files by name inside one directory.

    Attributes:
        secret: Random number of this store, which seeds its checksums.

    Raises:
        ConfigError: Another process uses it, it is not a store's, or it cannot be used.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"disk_path {path} cannot be used: {error.strerror}", field="disk_path") from error
        self._lock = -1
        try:
            names = set(os.listdir(self._fd)) - {"lost+found"}
            if _STORE not in names and names - {_LOCK, f"{_STORE}.new"}:
                raise ConfigError(f"disk_path {path} is neither empty nor a KV store's", field="disk_path")
            self._lock = self._open(_LOCK, os.O_RDWR | os.O_CREAT)
            self._take_lock()
            self.secret = self._identify()
        except OSError as error:
            self.close()
            raise ConfigError(f"disk_path {path} cannot be used: {error.strerror}", field="disk_path") from error
        except ConfigError:
            self.close()
            raise

    def segments(self) -> list[int]:
        """Return the numbers of the segments there are, rising."""
        found = [_SEGMENT.fullmatch(name) for name in os.listdir(self._fd)]
        return sorted(int(match[1], 16) for match in found if match)

    def create_segment(self, segment_id: int) -> int:
        """Return a new, empty segment's file descriptor."""
        return self._open(_name(segment_id), os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open_segment(self, segment_id: int, *, direct: bool = False) -> int:
        """Return a file descriptor of a segment, one that goes around the page cache if the file system can."""
        if direct:
            with contextlib.suppress(OSError):  # tmpfs and others have no O_DIRECT: through the cache, then
                return self._open(_name(segment_id), os.O_RDWR | os.O_DIRECT)
        return self._open(_name(segment_id), os.O_RDWR)

    @contextlib.contextmanager
    def reading(self, segment_id: int) -> Iterator[int]:
        """Open a segment for a while, through the page cache."""
        fd = self.open_segment(segment_id)
        try:
            yield fd
        finally:
            os.close(fd)

    def remove_segment(self, segment_id: int) -> None:
        """Delete a segment's file; :meth:`sync` makes that last."""
        os.unlink(_name(segment_id), dir_fd=self._fd)

    def read_checkpoint(self) -> bytes | None:
        """Return the last checkpoint's content, if there is one."""
        try:
            fd = self._open(_CHECKPOINT, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            return None if os.fstat(fd).st_size > _MAX_CHECKPOINT else file.read()

    def write_checkpoint(self, data: bytes) -> None:
        """Replace the checkpoint at once and for good."""
        self._replace(_CHECKPOINT, data)

    def sync(self) -> None:
        """Make names that came and went survive a loss of power."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Give the lock back."""
        for fd in (self._lock, self._fd):
            if fd >= 0:
                os.close(fd)
        self._lock = self._fd = -1

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | _FLAGS, _MODE, dir_fd=self._fd)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise ConfigError(f"disk_path {self.path} is used by another process", field="disk_path") from error

    def _identify(self) -> int:
        try:
            fd = self._open(_STORE, os.O_RDONLY)
        except FileNotFoundError:
            secret = secrets.randbits(64)
            self._replace(_STORE, encode_store(secret))
            return secret
        with open(fd, "rb") as file:
            found = decode_store(file.read(1024))
        if found is None:
            raise ConfigError(f"disk_path {self.path}: its file {_STORE!r} is damaged", field="disk_path")
        version, secret = found
        if version != VERSION:
            message = f"disk_path {self.path} has format {version}, this program reads {VERSION}"
            raise ConfigError(message, field="disk_path")
        return secret

    def _replace(self, name: str, data: bytes) -> None:
        fd = self._open(f"{name}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.rename(f"{name}.new", name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self.sync()


def _name(segment_id: int) -> str:
    return f"segment-{segment_id:016x}"
