"""The directory of a disk tier: locked, and identified by a file of its own. Also recovery at start.

Recovery reads the last checkpoint of the index, and the headers of records written after it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import xxhash

from baton.config.secrets import require_own_folder
from baton.errors import ConfigError
from baton.types import BlockHash
from baton_kvstore.tiers.disk.index import Location
from baton_kvstore.tiers.disk.segment import VERSION, RecordType, Segment, scan, sound_end
from baton_kvstore.types import PAGE

log = logging.getLogger(__name__)

_STORE = "store"
_LOCK = "lock"
_CHECKPOINT = "index"
_MAX_CHECKPOINT = 1 << 32
_SEGMENT = re.compile(r"segment-([0-9a-f]{16})")
_MODE = 0o600
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_HEAD = struct.Struct("<8sIQI")
_MAGIC = b"BATONIDX"
_COVERED = struct.Struct("<QQQ")
_ENTRY = struct.Struct("<QQ32s16s")
_STORE_HEAD = struct.Struct("<8sI8s")
_STORE_MAGIC = b"BATONDSK"
_SUM = struct.Struct("<Q")


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
            require_own_folder(self._fd, f"disk_path {path}", "disk_path")
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
        matches = [_SEGMENT.fullmatch(name) for name in os.listdir(self._fd)]
        return sorted(int(match[1], 16) for match in matches if match)

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

    def free_bytes(self) -> int:
        """Return the free bytes of the file system that this process may use."""
        stats = os.fstatvfs(self._fd)
        return stats.f_bavail * stats.f_frsize

    def sync(self) -> None:
        """Sync created and deleted names to disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Unlock and close the directory."""
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
            header = decode_store(file.read(1024))
        if header is None:
            raise ConfigError(
                f"disk_path {self.path}: its file {_STORE!r} is damaged: delete what is in it", field="disk_path"
            )
        version, secret = header
        if version != VERSION:
            message = f"disk_path {self.path} has format {version}, this program reads {VERSION}"
            raise ConfigError(message, field="disk_path")
        return secret

    def _replace(self, name: str, data: bytes) -> None:
        fd = self._open(f"{name}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
        except OSError:
            with contextlib.suppress(OSError):  # a part of it would take room on a full disk
                os.unlink(f"{name}.new", dir_fd=self._fd)
            raise
        os.rename(f"{name}.new", name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self.sync()


def _name(segment_id: int) -> str:
    return f"segment-{segment_id:016x}"


def encode_store(secret: int) -> bytes:
    """Return the content of the file that makes a directory a store."""
    body = _STORE_HEAD.pack(_STORE_MAGIC, VERSION, secret.to_bytes(8, "little"))
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def decode_store(data: bytes) -> tuple[int, int] | None:
    """Return version and secret, or ``None`` if it is not such a file."""
    if len(data) != _STORE_HEAD.size + _SUM.size:
        return None
    body = data[: _STORE_HEAD.size]
    magic, version, secret = _STORE_HEAD.unpack(body)
    if magic != _STORE_MAGIC or _SUM.unpack(data[_STORE_HEAD.size :])[0] != xxhash.xxh3_64_intdigest(body):
        return None
    return version, int.from_bytes(secret, "little")


@dataclass
class Recovered:
    """Content of a directory after recovery.

    Attributes:
        sequence: Sequence number of the next record.
        next_segment: Number of the next segment. Above every number in use or in the checkpoint, which outlives a
            crash and would confuse a new segment with an old one of the same number.
        segments: Open segments.
        blocks: Locations of blocks by KV format and hash.
        cut_bytes: Size of the torn ends that were discarded.
    """

    sequence: int = 1
    next_segment: int = 1
    segments: list[Segment] = field(default_factory=list)
    blocks: dict[bytes, dict[BlockHash, Location]] = field(default_factory=dict)
    cut_bytes: int = 0


def recover(directory: Directory, *, direct: bool) -> Recovered:
    """Open all segments, cut torn ends, and locate all blocks.

    Raises:
        OSError: The directory cannot be read or written.
    """
    recovered = Recovered()
    tombstones: dict[tuple[bytes, BlockHash], int] = {}
    data = directory.read_checkpoint()
    checkpoint = None if data is None else decode_checkpoint(data, directory.secret)
    if data is not None and checkpoint is None:
        log.warning("the index checkpoint is damaged; reading every record's header instead")
    sequence, known = checkpoint or (1, {})
    recovered.next_segment = max((*known, *directory.segments()), default=0) + 1
    if not all(_covers(directory, number, known[number]) for number in directory.segments() if number in known):
        log.warning("the index checkpoint does not fit the segments; reading every record's header instead")
        known = {}  # for all: a deletion may lie in one segment and what it deletes in another
    recovered.sequence = sequence
    for segment_id in directory.segments():
        _open(directory, segment_id, known.get(segment_id), recovered, tombstones, direct)
    for (key, name), deleted in tombstones.items():
        location = recovered.blocks.get(key, {}).get(name)
        if location is not None and location.sequence < deleted:
            del recovered.blocks[key][name]
    directory.sync()
    return recovered


def _open(
    directory: Directory,
    segment_id: int,
    covered: CheckpointSegment | None,
    recovered: Recovered,
    tombstones: dict[tuple[bytes, BlockHash], int],
    direct: bool,
) -> None:
    with directory.reading(segment_id) as fd:
        size = os.fstat(fd).st_size
        result = scan(fd, segment_id, directory.secret, 0 if covered is None else covered.end)
        if result is None:
            log.warning("segment %016x has no valid header and is dropped, %d bytes", segment_id, size)
            directory.remove_segment(segment_id)
            recovered.cut_bytes += size
            return
        kind, records = result
        end = sound_end(fd, records, PAGE if covered is None else covered.end)
        records = [item for item in records if item[0] < end]
        if end < size:
            os.ftruncate(fd, end)
            recovered.cut_bytes += size - end
            log.warning("segment %016x: a torn end of %d bytes was cut", segment_id, size - end)
        if records or end < size:
            os.fsync(fd)  # a killed process leaves what it wrote in the page cache
    aligned = direct and kind.block_bytes % PAGE == 0
    segment = Segment(segment_id, kind, directory.open_segment(segment_id, direct=aligned), end, direct=aligned)
    recovered.segments.append(segment)
    blocks = recovered.blocks.setdefault(kind.key, {})
    for item in [] if covered is None else covered.blocks:
        _add(blocks, item.block_hash, Location(segment, item.offset, item.sequence, item.digest))
        recovered.sequence = max(recovered.sequence, item.sequence + 1)
    for offset, record in records:
        recovered.sequence = max(recovered.sequence, record.sequence + 1)
        if record.type is RecordType.BLOCK:
            _add(blocks, record.block_hash, Location(segment, offset, record.sequence, record.digest))
        elif record.type is RecordType.TOMBSTONE:
            name = kind.key, record.block_hash
            tombstones[name] = max(tombstones.get(name, 0), record.sequence)
            segment.tombstone_bytes += PAGE


def _covers(directory: Directory, segment_id: int, covered: CheckpointSegment) -> bool:
    with directory.reading(segment_id) as fd:
        return PAGE <= covered.end <= os.fstat(fd).st_size and covered.end % PAGE == 0


def _add(blocks: dict[BlockHash, Location], block_hash: BlockHash, location: Location) -> None:
    old = blocks.get(block_hash)
    # Of copies with one number the first counts: if the original is still there, the copy may not have been synced.
    if old is None or old.sequence < location.sequence:
        blocks[block_hash] = location


@dataclass(frozen=True, slots=True)
class CheckpointBlock:
    """A block of a segment that could be recovered."""

    offset: int
    sequence: int
    block_hash: BlockHash
    digest: bytes


@dataclass(slots=True)
class CheckpointSegment:
    """What a checkpoint knows of a segment: everything before ``end``."""

    end: int
    blocks: list[CheckpointBlock] = field(default_factory=list)


def encode_checkpoint(sequence: int, segments: Iterable[tuple[int, CheckpointSegment]], secret: int) -> bytes:
    """Return the file's content.

    Args:
        sequence: Sequence number of the next record.
        segments: Numbers and covered parts of the segments.
        secret: The store's secret, which seeds checksums.
    """
    rows = list(segments)
    out = bytearray(_HEAD.pack(_MAGIC, VERSION, sequence, len(rows)))
    for segment_id, covered in rows:
        out += _COVERED.pack(segment_id, covered.end, len(covered.blocks))
        for known in covered.blocks:
            out += _ENTRY.pack(known.offset, known.sequence, known.block_hash, known.digest)
    out += _SUM.pack(xxhash.xxh3_64_intdigest(out, seed=secret))
    return bytes(out)


def decode_checkpoint(data: bytes, secret: int) -> tuple[int, dict[int, CheckpointSegment]] | None:
    """Return the next sequence and what is known of each segment, or ``None`` if it is not a whole checkpoint."""
    end = len(data) - _SUM.size
    if end < _HEAD.size:
        return None
    if _SUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(memoryview(data)[:end], seed=secret):
        return None
    magic, version, sequence, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != VERSION:
        return None
    segments: dict[int, CheckpointSegment] = {}
    at = _HEAD.size
    for _ in range(count):
        if end - at < _COVERED.size:
            return None
        segment_id, covered_end, num_blocks = _COVERED.unpack_from(data, at)
        at += _COVERED.size
        if num_blocks * _ENTRY.size > end - at:
            return None
        rows = _ENTRY.iter_unpack(memoryview(data)[at : at + num_blocks * _ENTRY.size])
        segments[segment_id] = CheckpointSegment(
            covered_end, [CheckpointBlock(o, s, BlockHash(h), d) for o, s, h, d in rows]
        )
        at += num_blocks * _ENTRY.size
    return (sequence, segments) if at == end else None
