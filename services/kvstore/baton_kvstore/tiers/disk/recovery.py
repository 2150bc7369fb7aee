"""What a start finds: the last checkpoint, and the headers of records written after it."""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash

from baton.types import BlockHash
from baton_kvstore.tiers.disk.directory import Directory
from baton_kvstore.tiers.disk.format import PAGE, VERSION, RecordType
from baton_kvstore.tiers.disk.index import Location
from baton_kvstore.tiers.disk.segment import Segment, scan, sound_end

log = logging.getLogger(__name__)


@dataclass
class Recovered:
    """What was on disk.

    Attributes:
        sequence: The next record's.
        blocks: By kind and hash.
        cut_bytes: Torn ends that were thrown away.
    """

    sequence: int = 1
    segments: list[Segment] = field(default_factory=list)
    blocks: dict[bytes, dict[BlockHash, Location]] = field(default_factory=dict)
    cut_bytes: int = 0


def recover(directory: Directory, *, direct: bool) -> Recovered:
    """Open every segment, cut torn ends, and find out what can be found.

    Raises:
        OSError: The directory cannot be read or written.
    """
    found = Recovered()
    tombstones: dict[tuple[bytes, BlockHash], int] = {}
    data = directory.read_checkpoint()
    checkpoint = None if data is None else decode_checkpoint(data, directory.secret)
    if data is not None and checkpoint is None:
        log.warning("the index checkpoint is damaged; reading every record's header instead")
    sequence, known = checkpoint or (1, {})
    if not all(_covers(directory, number, known[number]) for number in directory.segments() if number in known):
        log.warning("the index checkpoint does not fit the segments; reading every record's header instead")
        known = {}  # for all: a deletion may lie in one segment and what it deletes in another
    found.sequence = sequence
    for segment_id in directory.segments():
        _open(directory, segment_id, known.get(segment_id), found, tombstones, direct)
    for (key, name), deleted in tombstones.items():
        location = found.blocks.get(key, {}).get(name)
        if location is not None and location.sequence < deleted:
            del found.blocks[key][name]
    directory.sync()
    return found


def _open(
    directory: Directory,
    segment_id: int,
    covered: Covered | None,
    found: Recovered,
    tombstones: dict[tuple[bytes, BlockHash], int],
    direct: bool,
) -> None:
    with directory.reading(segment_id) as fd:
        size = os.fstat(fd).st_size
        result = scan(fd, segment_id, directory.secret, 0 if covered is None else covered.end)
        if result is None:
            log.warning("segment %016x has no valid header and is dropped, %d bytes", segment_id, size)
            directory.remove_segment(segment_id)
            found.cut_bytes += size
            return
        kind, records = result
        end = sound_end(fd, records, PAGE if covered is None else covered.end)
        records = [item for item in records if item[0] < end]
        if end < size:
            os.ftruncate(fd, end)
            found.cut_bytes += size - end
            log.warning("segment %016x: a torn end of %d bytes was cut", segment_id, size - end)
        if records or end < size:
            os.fsync(fd)  # a killed process leaves what it wrote in the page cache
    aligned = direct and kind.block_bytes % PAGE == 0
    segment = Segment(segment_id, kind, directory.open_segment(segment_id, direct=aligned), end, direct=aligned)
    found.segments.append(segment)
    blocks = found.blocks.setdefault(kind.key, {})
    for item in [] if covered is None else covered.blocks:
        _add(blocks, item.block_hash, Location(segment, item.offset, item.sequence, item.digest))
        found.sequence = max(found.sequence, item.sequence + 1)
    for offset, record in records:
        found.sequence = max(found.sequence, record.sequence + 1)
        if record.type is RecordType.BLOCK:
            _add(blocks, record.block_hash, Location(segment, offset, record.sequence, record.digest))
        elif record.type is RecordType.TOMBSTONE:
            name = kind.key, record.block_hash
            tombstones[name] = max(tombstones.get(name, 0), record.sequence)
            segment.tombstone_bytes += PAGE


def _covers(directory: Directory, segment_id: int, covered: Covered) -> bool:
    with directory.reading(segment_id) as fd:
        return PAGE <= covered.end <= os.fstat(fd).st_size and covered.end % PAGE == 0


def _add(blocks: dict[BlockHash, Location], block_hash: BlockHash, location: Location) -> None:
    old = blocks.get(block_hash)
    # Of copies with one number the first counts: if the original is still there, the copy may not have been synced.
    if old is None or old.sequence < location.sequence:
        blocks[block_hash] = location


_HEAD = struct.Struct("<8sIQI")
_MAGIC = b"BATONIDX"
_SEGMENT = struct.Struct("<QQQ")
_ENTRY = struct.Struct("<QQ32s16s")
_SUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Known:
    """A block of a segment that could be found."""

    offset: int
    sequence: int
    block_hash: BlockHash
    digest: bytes


@dataclass(slots=True)
class Covered:
    """What a checkpoint knows of a segment: everything before ``end``."""

    end: int
    blocks: list[Known] = field(default_factory=list)


def encode_checkpoint(sequence: int, segments: Iterable[tuple[int, Covered]], secret: int) -> bytes:
    """Return the file's content.

    Args:
        sequence: The next record's.
        segments: Numbers, and what is covered of each.
        secret: Of the store.
    """
    rows = list(segments)
    out = bytearray(_HEAD.pack(_MAGIC, VERSION, sequence, len(rows)))
    for segment_id, covered in rows:
        out += _SEGMENT.pack(segment_id, covered.end, len(covered.blocks))
        for known in covered.blocks:
            out += _ENTRY.pack(known.offset, known.sequence, known.block_hash, known.digest)
    out += _SUM.pack(xxhash.xxh3_64_intdigest(out, seed=secret))
    return bytes(out)


def decode_checkpoint(data: bytes, secret: int) -> tuple[int, dict[int, Covered]] | None:
    """Return the next sequence and what is known of each segment, or ``None`` if it is not a whole checkpoint."""
    end = len(data) - _SUM.size
    if end < _HEAD.size:
        return None
    if _SUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(memoryview(data)[:end], seed=secret):
        return None
    magic, version, sequence, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != VERSION:
        return None
    segments: dict[int, Covered] = {}
    at = _HEAD.size
    for _ in range(count):
        if end - at < _SEGMENT.size:
            return None
        segment_id, covered_end, num_blocks = _SEGMENT.unpack_from(data, at)
        at += _SEGMENT.size
        if num_blocks * _ENTRY.size > end - at:
            return None
        rows = _ENTRY.iter_unpack(memoryview(data)[at : at + num_blocks * _ENTRY.size])
        segments[segment_id] = Covered(covered_end, [Known(o, s, BlockHash(h), d) for o, s, h, d in rows])
        at += num_blocks * _ENTRY.size
    return (sequence, segments) if at == end else None
