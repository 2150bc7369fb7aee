"""Block reads on a byte stream: how a request and its answer are written, and checksums over them.

::

    READ    count u32 | segments u32 | source rank u32 | flags u32 | block ids u32[count] | generations u64[count]
            | (source offset u64, bytes u64)[segments] | digest u64
    BLOCKS  sent: bitmap | bytes of the sent blocks, in the order asked for | unchanged: bitmap
            | with checksums: u64 per sent block | digest u64 of the bitmaps and the checksums

No segments: whole blocks. ``sent`` says which blocks had the generation asked for before they were sent, ``unchanged``
which had it afterwards; a block counts only if both say so, and if its checksum (XXH3, 64 bits) is that of the bytes
that came. Bit 0 of the flags asks for checksums; bits 8 to 15 are the connections that share the read. Bitmaps have
ceil(count / 8) bytes, little bit order; integers are little-endian.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from baton.errors import InvalidRequestError
from baton.kv.reshard import Segments
from baton.kv.shards import KVShards
from baton.native import address_of
from baton.transport.block_types import MAX_BLOCKS_PER_READ, MAX_SEGMENTS, BlockReads, Bytes, Ids, Valid
from baton.transport.sockets import Buffer
from baton.transport.wire import BadFrameError

_HEAD = struct.Struct("<IIII")
_DIGEST = struct.Struct("<Q")
_CHECKSUMS = 1
_STREAMS_SHIFT, _STREAMS_MASK = 8, 255
_BYTES_PER_ENTRY = 4 + 8
_BYTES_PER_SEGMENT = 16
DIGEST_BYTES = _DIGEST.size
MAX_READ_BYTES = _HEAD.size + _BYTES_PER_ENTRY * MAX_BLOCKS_PER_READ + _BYTES_PER_SEGMENT * MAX_SEGMENTS + _DIGEST.size

Checksums = npt.NDArray[np.uint64]
Spans = npt.NDArray[np.uint64]
"""uint64 [n, 2]: address and bytes."""


class Request(NamedTuple):
    """A request: its reads, whose local ids are just 0, 1, ..., and how they are made.

    Attributes:
        reads: What is asked for.
        checksums: Whether checksums are wanted.
        streams: Connections that share the read.
    """

    reads: BlockReads
    checksums: bool
    streams: int


def pack_request(reads: BlockReads, *, checksums: bool, streams: int = 1) -> bytes:
    """Write a request; at most ``MAX_BLOCKS_PER_READ`` blocks of ``MAX_SEGMENTS`` segments."""
    segments = np.empty((0, 3), np.int64) if reads.segments is None else reads.segments
    flags = (_CHECKSUMS if checksums else 0) | min(streams, _STREAMS_MASK) << _STREAMS_SHIFT
    body = b"".join(
        (
            _HEAD.pack(len(reads), len(segments), reads.source_shard, flags),
            reads.remote_ids.astype("<u4").tobytes(),
            reads.generations.astype("<u8").tobytes(),
            segments[:, [0, 2]].astype("<u8").tobytes(),
        )
    )
    return body + _DIGEST.pack(xxhash.xxh3_64_intdigest(body))


def parse_request(payload: bytearray) -> Request:
    """Read a request's payload.

    Raises:
        BadFrameError: It is malformed, or was damaged on its way.
    """
    if len(payload) < _HEAD.size + _DIGEST.size:
        raise BadFrameError("a READ frame is too short")
    count, num_segments, shard, flags = _HEAD.unpack_from(payload)
    size = _HEAD.size + _BYTES_PER_ENTRY * count + _BYTES_PER_SEGMENT * num_segments + _DIGEST.size
    if len(payload) != size:
        raise BadFrameError(f"a READ frame for {count} blocks of {num_segments} segments has {len(payload)} bytes")
    body = memoryview(payload)[: -_DIGEST.size]
    if _DIGEST.unpack_from(payload, len(body))[0] != xxhash.xxh3_64_intdigest(body):
        raise BadFrameError("a READ frame was damaged on its way")
    at = _HEAD.size
    ids = np.frombuffer(payload, "<u4", count, at).astype(np.int64)
    generations = np.frombuffer(payload, "<u8", count, at + 4 * count).astype(np.uint64)
    segments = None
    if num_segments:
        table = np.frombuffer(payload, "<u8", 2 * num_segments, at + _BYTES_PER_ENTRY * count).reshape(-1, 2)
        if int(table.max()) >= 2**62:
            raise BadFrameError("a READ frame has segments beyond any block")
        segments = np.zeros((num_segments, 3), np.int64)
        segments[:, [0, 2]] = table
    reads = BlockReads(ids, generations, np.arange(count), segments, shard)
    return Request(reads, bool(flags & _CHECKSUMS), flags >> _STREAMS_SHIFT & _STREAMS_MASK)


def check_request(reads: BlockReads, shards: KVShards) -> None:
    """Refuse what lies outside an instance's arenas.

    Raises:
        InvalidRequestError: Names what does.
    """
    if reads.source_shard >= len(shards.arenas):
        raise InvalidRequestError(
            f"rank {reads.source_shard} is asked for, there are {len(shards.arenas)}", field="source_shard"
        )
    reads.check_range(shards.primary.num_blocks, len(reads))
    if reads.segments is not None:
        size = shards.arenas[reads.source_shard].block_bytes
        ends = reads.segments[:, 0] + reads.segments[:, 2]
        if int(ends.max()) > size or int(reads.segments[:, 2].sum()) > size:
            raise InvalidRequestError(f"segments reach beyond a block of {size} bytes", field="segments")


def source_views(blocks: Bytes, ids: Ids, segments: Segments) -> list[memoryview]:
    """Return views of what is read, block by block, neighbours joined."""
    return _views(blocks, ids, segments[:, 0], segments[:, 2])


def target_views(blocks: Bytes, ids: Ids, segments: Segments) -> list[memoryview]:
    """Return views of where it goes, block by block, neighbours joined."""
    return _views(blocks, ids, segments[:, 1], segments[:, 2])


def checksums_of(blocks: Bytes, ids: Ids, offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Checksums:
    """Return each block's checksum over its segments in their order, uint64 [n]."""
    flat, size = blocks.reshape(-1).data, blocks.shape[1]
    if len(offsets) == 1:
        first, count = int(offsets[0]), int(sizes[0])
        one = [xxhash.xxh3_64_intdigest(flat[at : at + count]) for at in (ids * size + first).tolist()]
        return np.array(one, dtype=np.uint64)
    spans = list(zip(offsets.tolist(), (offsets + sizes).tolist(), strict=True))
    out = []
    for base in (ids * size).tolist():
        digest = xxhash.xxh3_64()
        for begin, end in spans:
            digest.update(flat[base + begin : base + end])
        out.append(digest.intdigest())
    return np.array(out, dtype=np.uint64)


def pack_bits(bits: Valid) -> bytes:
    """Write a bitmap."""
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_bits(data: Buffer, count: int) -> Valid:
    """Read a bitmap, bool [count]."""
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count, bitorder="little").astype(np.bool_)


def pack_tail(sent: bytes, unchanged: bytes, sums: Checksums | None) -> bytes:
    """Write what follows the bytes of an answer."""
    if sums is None:
        return unchanged
    tail = unchanged + sums.astype("<u8").tobytes()
    return tail + _DIGEST.pack(xxhash.xxh3_64_intdigest(sent + tail))


def tail_bytes(count: int, num_sent: int, *, checksums: bool) -> int:
    """Bytes of an answer's tail for ``count`` blocks asked for."""
    return -(-count // 8) + (8 * num_sent + _DIGEST.size if checksums else 0)


def parse_tail(sent: Buffer, tail: Buffer, count: int, *, checksums: bool) -> tuple[Valid, Checksums | None]:
    """Read a tail: which blocks were unchanged, and the checksums of those sent.

    Raises:
        BadFrameError: It was damaged on its way.
    """
    bitmap = -(-count // 8)
    unchanged = unpack_bits(memoryview(tail)[:bitmap], count)
    if not checksums:
        return unchanged, None
    body = memoryview(tail)[: -_DIGEST.size]
    if _DIGEST.unpack_from(tail, len(body))[0] != xxhash.xxh3_64_intdigest(bytes(sent) + bytes(body)):
        raise BadFrameError("an answer was damaged on its way")
    return unchanged, np.frombuffer(body, "<u8", offset=bitmap).astype(np.uint64)


def source_spans(blocks: Bytes, ids: Ids, segments: Segments) -> Spans:
    """Return where what is read lies, block by block, neighbours joined."""
    return _spans(blocks, ids, segments[:, 0], segments[:, 2])


def target_spans(blocks: Bytes, ids: Ids, segments: Segments) -> Spans:
    """Return where it goes, block by block, neighbours joined."""
    return _spans(blocks, ids, segments[:, 1], segments[:, 2])


def _views(blocks: Bytes, ids: Ids, offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> list[memoryview]:
    begins, ends = _runs(blocks, ids, offsets, sizes)
    flat = blocks.reshape(-1).data
    return [flat[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


def _spans(blocks: Bytes, ids: Ids, offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Spans:
    begins, ends = _runs(blocks, ids, offsets, sizes)
    return np.stack((begins + address_of(blocks), ends - begins), axis=1).astype(np.uint64)


def _runs(
    blocks: Bytes, ids: Ids, offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First and end byte, within the pool, of each run of neighbours."""
    begins = (ids[:, None] * blocks.shape[1] + offsets).ravel()
    ends = begins + np.broadcast_to(sizes, (len(ids), len(sizes))).ravel()
    if not len(begins):
        return begins, ends
    first = np.flatnonzero(np.concatenate(([True], begins[1:] != ends[:-1])))
    last = np.concatenate((first[1:], [len(begins)])) - 1
    return begins[first], ends[last]
