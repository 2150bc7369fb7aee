"""A directory of block files that several processes share, bounded in size.

A block is a safetensors file: K and V of every layer as tensors, in the metadata what they are and a checksum. The
bytes after the header are the block's own, undivided and without padding, so reading and writing copy nothing. The
header of a block is known before its file is read, all but the checksum: a file that begins otherwise is damaged, or
another application's.

A file gets its name when it is whole, by a rename, so half of one is never read. Each process adds up what it
writes and looks through the whole directory now and then; when it holds too much, the files that were used longest ago
go. Processes need not know of each other: a file that another process removed is a miss.
Prompts can be told from KV, so files and folders are their owner's alone: processes that share them have one user.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from baton.config.secrets import require_own_folder
from baton.errors import ConfigError, QueueFullError, TransferError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.kv_types import DTYPE_BYTES, SCALE_BYTES
from baton.kv_cache.layout import KVLayout
from baton.types import BlockHash

log = logging.getLogger(__name__)

FORMAT = "baton-kv-block-1"
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8", "fp8_e4m3": "F8_E4M3"}
_CHECKSUM = "xxh3_128"
_NO_CHECKSUM = "0" * 32
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


class DamagedFileError(Exception):
    """A file does not hold what its name says."""


class BlockFormat:
    """How the blocks of one kind of KV are written.

    Args:
        whole: Their fingerprint, undivided.

    Attributes:
        num_bytes: Of a block's tensors.
    """

    def __init__(self, whole: Fingerprint) -> None:
        layout = KVLayout(whole.layer_shapes, whole.block_size, whole.kv_dtype)
        tensors: dict[str, Any] = {}
        self.num_bytes = 0
        for layer, (shape, place) in enumerate(zip(layout.layers, layout.places, strict=True)):
            rows = [shape.kv_heads, layout.block_size]
            parts = (
                ("k", place.k, _DTYPES[place.dtype], [*rows, shape.k_dim], DTYPE_BYTES[place.dtype]),
                ("v", place.v, _DTYPES[place.dtype], [*rows, shape.v_dim], DTYPE_BYTES[place.dtype]),
                ("k_scales", place.k_scales, "BF16", rows, SCALE_BYTES),
                ("v_scales", place.v_scales, "BF16", rows, SCALE_BYTES),
            )
            for name, at, dtype, dims, unit in parts:
                size = math.prod(dims) * unit
                if at < 0 or not size or (name == "v_scales" and not shape.v_dim):
                    continue
                if at != self.num_bytes:  # safetensors has no holes between tensors
                    kind = f"{whole.kv_dtype} with {layout.block_size} tokens per block"
                    raise ConfigError(f"KV of {kind} has gaps that block files cannot have", field="kv_dtype")
                tensors[f"layers.{layer}.{name}"] = {"dtype": dtype, "shape": dims, "data_offsets": [at, at + size]}
                self.num_bytes = at + size
        self._template = _template(whole.digest().hex(), tensors)
        self._header_bytes = len(self._header(BlockHash(bytes(32)), _NO_CHECKSUM))

    @property
    def file_bytes(self) -> int:
        """Size of a file."""
        return self._header_bytes + self.num_bytes

    def read(self, path: Path, name: BlockHash, into: npt.NDArray[np.uint8]) -> float:
        """Fill a slot from a file and return when the file was used last, in seconds of the epoch.

        Args:
            path: The file.
            name: Hash of the block that it should hold.
            into: uint8 [block bytes]; if this raises, it may hold anything.

        Raises:
            DamagedFileError: Size, header or checksum are not what they must be.
            OSError: It is not there, or cannot be read.
        """
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if status.st_size != self.file_bytes:
                raise DamagedFileError(f"{status.st_size} bytes instead of {self.file_bytes}")
            header = file.read(self._header_bytes)
            data = into[: self.num_bytes].data
            at = 0
            while at < self.num_bytes and (count := file.readinto(data[at:])):
                at += count
        if at != self.num_bytes or header != self._header(name, xxhash.xxh3_128_hexdigest(data)):
            raise DamagedFileError("header or checksum are wrong")
        return status.st_mtime

    def write(self, path: Path, name: BlockHash, block: npt.NDArray[np.uint8], *, sync: bool) -> None:
        """Write a new file, which other processes do not see as long as its name is not known.

        Args:
            path: The file, which must not be there.
            name: Hash of the block.
            block: uint8 [block bytes].
            sync: Return when it would survive a loss of power.

        Raises:
            OSError: It could not be written whole.
        """
        data = block[: self.num_bytes].data
        pieces = [memoryview(self._header(name, xxhash.xxh3_128_hexdigest(data))), data]
        with open(path, "xb", buffering=0, opener=_open_private) as file:
            for piece in pieces:
                at = 0
                while at < len(piece):
                    at += file.write(piece[at:])
            if sync:
                os.fsync(file.fileno())

    def _header(self, name: BlockHash, checksum: str) -> bytes:
        return self._template % (name.hex().encode(), checksum.encode())


def _template(digest: str, tensors: dict[str, Any]) -> bytes:
    """Return a header with places for the block hash and the checksum, 64 and 32 characters of hexadecimal."""
    metadata = {"format": FORMAT, "fingerprint": digest, "block_hash": "%b", _CHECKSUM: "%b"}
    text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
    length = len(text % (b"0" * 64, b"0" * 32))
    padding = -length % 8
    return (length + padding).to_bytes(8, "little").replace(b"%", b"%%") + text + b" " * padding


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
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            require_own_folder(self._folder, self._folder, "kv_connector_options")
            _make_private(self._folder)
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
            file.parent.mkdir(mode=0o700, exist_ok=True)
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


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _make_private(folder: Path) -> None:
    """Keep other users out of a folder of ours; an earlier version let them read what it wrote."""
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        folder.chmod(0o700)
        log.warning("%s could be used by others than its owner: it is private now", folder)


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
