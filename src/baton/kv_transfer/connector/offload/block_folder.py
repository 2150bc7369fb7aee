"""A directory of block files that several processes share, bounded in size.

A file gets its name when it is whole, by a rename, so half of one is never read. Each process adds up what it
writes and looks through the whole directory now and then; when it holds too much, the files that were used longest ago
go. Processes need not know of each other: a file that another process removed is a miss.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError, QueueFullError, TransferError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.connector.offload.block_file import FORMAT, BlockFormat, DamagedFileError
from baton.types import BlockHash

log = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_PART = ".part"
_TOUCH_S = 60.0
"""A use is noted in the file's time at most this often: LRU to the minute, without a write per read."""
_LOST_S = 600.0
"""Age from which a part that was not renamed belongs to a process that died."""
_RESCAN_SHARE = 0.05
"""Share of the limit that this process may write until it looks what others wrote."""
_KEEP_SHARE = 0.9
"""Share of the limit that stays when files are removed."""


class BlockFolder:
    """The files of one kind of KV in a directory. Its methods block, and may be called from several threads.

    Args:
        path: The directory, made if it is not there; it may hold other kinds' blocks, which count for the limit.
        whole: Fingerprint of the blocks, undivided.
        max_bytes: Size of all block files in ``path``, about: several writers may exceed it by a twentieth each.
        sync: Write so that files survive a loss of power.

    Attributes:
        num_damaged: Files that were damaged, and were removed.
        num_evicted: Files removed to make room.

    Raises:
        ConfigError: The directory cannot be used, or is too small for a block.
    """

    def __init__(self, path: Path, whole: Fingerprint, *, max_bytes: int, sync: bool) -> None:
        self._format = BlockFormat(whole)
        if max_bytes < 2 * self._format.file_bytes:
            message = f"{max_bytes} bytes are too few for blocks of {self._format.file_bytes}"
            raise ConfigError(message, field="kv_connector_options")
        self.path = path
        self._folder = path / f"{FORMAT}-{whole.digest().hex()[:32]}"
        self._max_bytes, self._sync = max_bytes, sync
        self._lock = threading.Lock()
        self._scan = threading.Lock()
        self._used = self._unseen = 0
        self._scanned = False
        self.num_damaged = self.num_evicted = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"{path} cannot be used: {error.strerror}"
            raise ConfigError(message, field="kv_connector_options") from error

    @property
    def used_bytes(self) -> int:
        """Size of all files, as far as this process knows."""
        return self._used

    @property
    def num_bytes(self) -> int:
        """Bytes of a block's tensors."""
        return self._format.num_bytes

    def holds(self, name: BlockHash) -> bool:
        """Whether a block is there, damaged or not; counts as a use.

        Raises:
            TransferError: The file system does not answer as it should.
        """
        file = self._file(name)
        try:
            self._touch(file, file.stat().st_mtime)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise TransferError(f"{file} cannot be looked at: {error.strerror}") from error
        return True

    def read(self, name: BlockHash, into: npt.NDArray[np.uint8]) -> bool:
        """Fill a slot; ``False``: the block is not there, or was damaged and is removed.

        Raises:
            TransferError: The file system does not answer as it should.
        """
        file = self._file(name)
        try:
            self._touch(file, self._format.read(file, name, into))
        except FileNotFoundError:
            return False
        except DamagedFileError as error:
            log.error("%s is damaged and removed: %s", file, error)
            self.num_damaged += 1
            self._remove(file, self._format.file_bytes)
            return False
        except OSError as error:
            raise TransferError(f"{file} cannot be read: {error.strerror}") from error
        return True

    def write(self, name: BlockHash, block: npt.NDArray[np.uint8]) -> int:
        """Write a block that is not there, making room for it; returns the bytes written.

        Raises:
            QueueFullError: The file system is full.
            TransferError: It does not answer as it should.
        """
        file = self._file(name)
        part = file.with_name(f"{file.stem}.{secrets.token_hex(8)}{_PART}")
        try:
            file.parent.mkdir(exist_ok=True)
            try:
                self._format.write(part, name, block, sync=self._sync)
                part.rename(file)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            if self._sync:
                _sync_folder(file.parent)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise QueueFullError(f"no room in {self.path}", retry_after_s=1.0) from error
            raise TransferError(f"{file} cannot be written: {error.strerror}") from error
        size = self._format.file_bytes
        with self._lock:
            self._used += size
            self._unseen += size
            due = self._used > self._max_bytes or self._unseen > _RESCAN_SHARE * self._max_bytes or not self._scanned
        if due:
            self.sweep()
        return size

    def sweep(self) -> None:
        """Look what is there, and remove what was used longest ago if it is too much."""
        if not self._scan.acquire(blocking=False):
            return  # another process is at it
        try:
            with self._lock:
                self._unseen = 0
            files = sorted(self._files())
            used = sum(size for _, size, _ in files)
            left = _KEEP_SHARE * self._max_bytes if used > self._max_bytes else used
            for _, size, path in files:
                if used <= left:
                    break
                self.num_evicted += self._remove(Path(path), 0)
                used -= size
            with self._lock:
                self._used, self._scanned = used + self._unseen, True
        finally:
            self._scan.release()

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Yield time of last use, size and path of every block file; remove lost parts on the way."""
        lost = time.time() - _LOST_S
        for kind in _entries(self.path):
            if not kind.name.startswith(FORMAT):
                continue
            for group in _entries(Path(kind.path)):
                for file in _entries(Path(group.path)):
                    try:
                        status = file.stat()
                    except OSError:  # removed meanwhile
                        continue
                    if file.name.endswith(_SUFFIX):
                        yield status.st_mtime, status.st_size, file.path
                    elif file.name.endswith(_PART) and status.st_mtime < lost:
                        self._remove(Path(file.path), 0)

    def _file(self, name: BlockHash) -> Path:
        text = name.hex()
        return self._folder / text[:2] / f"{text}{_SUFFIX}"

    def _touch(self, file: Path, used_at: float) -> None:
        if time.time() - used_at > _TOUCH_S:
            os.utime(file)

    def _remove(self, file: Path, size: int) -> bool:
        try:
            file.unlink()
        except OSError as error:
            if error.errno != errno.ENOENT:
                log.error("%s cannot be removed: %s", file, error)
            return False
        with self._lock:
            self._used -= size
        return True


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What a folder holds; nothing if it is none, or gone."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
