"""Block reads on a byte stream: how a request and its answer are written, and checksums over them.

::

    READ    count u32 | segments u32 | source rank u32 | flags u32 | steps u32 | block ids u32[count]
            | generations u64[count] | (source offset u64, bytes u64)[segments]
            | (ready u64, segments u64)[steps] | digest u64
    BLOCKS  sent: bitmap | step by step, bytes of the sent blocks in the order asked for | unchanged: bitmap
            | with steps: microseconds u64 that went by in waiting for the computation
            | with checksums: u64 per step and sent block | digest u64 of all but the blocks' bytes

No segments: whole blocks. With steps the next so many segments are sent once the source's progress has come so far, and
further requests may be under way meanwhile; they are answered in their order. ``sent`` says which blocks had the
generation asked for before they were sent, ``unchanged`` which had it afterwards; a block counts only if both say so,
and if its checksums (XXH3, 64 bits) are those of the bytes that came. Bit 0 of the flags asks for checksums; bits 8 to
15 are the connections that share the read. Bitmaps have ceil(count / 8) bytes, little bit order; integers are
little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from baton.errors import InvalidRequestError
from baton.kv_cache.reshard import Segments
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.protocol.frames import BadFrameError
from baton.kv_transfer.protocol.sockets import Buffer
from baton.kv_transfer.types import MAX_BLOCKS_PER_READ, MAX_SEGMENTS, MAX_STEPS, BlockReads, Bytes, Ids, Valid
from baton.native import address_of

_HEAD = struct.Struct("<IIIII")
_DIGEST = struct.Struct("<Q")
_WAITED = struct.Struct("<Q")
_CHECKSUMS = 1
_STREAMS_SHIFT, _STREAMS_MASK = 8, 255
_BYTES_PER_ENTRY = 4 + 8
_BYTES_PER_SEGMENT = 16
_BYTES_PER_STEP = 16
DIGEST_BYTES = _DIGEST.size
MAX_READ_BYTES = (
    _HEAD.size
    + _BYTES_PER_ENTRY * MAX_BLOCKS_PER_READ
    + _BYTES_PER_SEGMENT * MAX_SEGMENTS
    + _BYTES_PER_STEP * MAX_STEPS
    + _DIGEST.size
)

Checksums = npt.NDArray[np.uint64]
Spans = npt.NDArray[np.uint64]
"""uint64 [n, 2]: address and bytes."""
Numbers = npt.NDArray[np.int64]


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
    """Write a request; at most :attr:`~BlockReads.blocks_per_request` blocks of ``MAX_SEGMENTS`` segments."""
    segments = np.empty((0, 3), np.int64) if reads.segments is None else reads.segments
    steps = np.empty((0, 2), np.int64) if reads.steps is None else reads.steps
    flags = (_CHECKSUMS if checksums else 0) | min(streams, _STREAMS_MASK) << _STREAMS_SHIFT
    body = b"".join(
        (
            _HEAD.pack(len(reads), len(segments), reads.source_shard, flags, len(steps)),
            reads.remote_ids.astype("<u4").tobytes(),
            reads.generations.astype("<u8").tobytes(),
            segments[:, [0, 2]].astype("<u8").tobytes(),
            steps.astype("<u8").tobytes(),
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
    count, num_segments, shard, flags, num_steps = _HEAD.unpack_from(payload)
    at = _HEAD.size + _BYTES_PER_ENTRY * count
    steps_at = at + _BYTES_PER_SEGMENT * num_segments
    size = steps_at + _BYTES_PER_STEP * num_steps + _DIGEST.size
    if len(payload) != size:
        raise BadFrameError(f"a READ frame for {count} blocks of {num_segments} segments has {len(payload)} bytes")
    body = memoryview(payload)[: -_DIGEST.size]
    if _DIGEST.unpack_from(payload, len(body))[0] != xxhash.xxh3_64_intdigest(body):
        raise BadFrameError("a READ frame was damaged on its way")
    ids = np.frombuffer(payload, "<u4", count, _HEAD.size).astype(np.int64)
    generations = np.frombuffer(payload, "<u8", count, _HEAD.size + 4 * count).astype(np.uint64)
    segments = None
    if num_segments:
        segments = np.zeros((num_segments, 3), np.int64)
        segments[:, [0, 2]] = _pairs(payload, at, num_segments, "segments")
    steps = _pairs(payload, steps_at, num_steps, "steps") if num_steps else None
    if steps is not None and not _adds_up(steps[:, 1], num_segments):
        raise BadFrameError(f"a READ frame's steps do not have {num_segments} segments in all")
    reads = BlockReads(ids, generations, np.arange(count), segments, shard, steps)
    return Request(reads, bool(flags & _CHECKSUMS), flags >> _STREAMS_SHIFT & _STREAMS_MASK)


def _adds_up(counts: npt.NDArray[np.int64], total: int) -> bool:
    """Whether positive numbers have a sum; their sum may not fit what they are kept in."""
    return int(counts.min()) >= 1 and int(counts.max()) <= total and int(counts.sum()) == total


def _pairs(payload: bytearray, at: int, count: int, name: str) -> npt.NDArray[np.int64]:
    table = np.frombuffer(payload, "<u8", 2 * count, at).reshape(-1, 2)
    if int(table.max()) >= 2**62:
        raise BadFrameError(f"a READ frame has {name} beyond any block")
    return table.astype(np.int64)


def check_request(reads: BlockReads, shards: KVShards) -> None:
    """Refuse what lies outside an instance's arenas.

    Raises:
        InvalidRequestError: Names what does.
    """
    if reads.source_shard >= len(shards.arenas):
        raise InvalidRequestError(
            f"rank {reads.source_shard} is asked for, there are {len(shards.arenas)}", field="source_shard"
        )
    if len(reads) > reads.blocks_per_request:
        raise InvalidRequestError(
            f"{len(reads)} blocks of {reads.num_segments} segments are too many for one request", field="segments"
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


class Tail(NamedTuple):
    """What follows the bytes of an answer.

    Attributes:
        unchanged: Which of the blocks had the same generation afterwards, bool [n].
        sums: Step by step the checksums of the blocks sent, uint64 [steps * sent]; ``None``: not asked for.
        waited_us: Microseconds that went by in waiting for the source's computation.
    """

    unchanged: Valid
    sums: Checksums | None
    waited_us: int


def pack_tail(reads: BlockReads, sent: bytes, tail: Tail) -> bytes:
    """Write an answer's tail; ``sent``: its first bitmap."""
    data = pack_bits(tail.unchanged)
    if reads.steps is not None:
        data += _WAITED.pack(tail.waited_us)
    if tail.sums is None:
        return data
    data += tail.sums.astype("<u8").tobytes()
    return data + _DIGEST.pack(xxhash.xxh3_64_intdigest(sent + data))


def tail_bytes(reads: BlockReads, num_sent: int, *, checksums: bool) -> int:
    """Bytes of the tail of an answer with so many blocks."""
    size, num_steps = -(-len(reads) // 8), 1
    if reads.steps is not None:
        size, num_steps = size + _WAITED.size, len(reads.steps)
    return size + (8 * num_steps * num_sent + _DIGEST.size if checksums else 0)


def parse_tail(reads: BlockReads, sent: Buffer, data: Buffer, *, checksums: bool) -> Tail:
    """Read a tail of the right length; ``sent``: the answer's first bitmap.

    Raises:
        BadFrameError: It was damaged on its way.
    """
    at = -(-len(reads) // 8)
    unchanged, waited_us = unpack_bits(memoryview(data)[:at], len(reads)), 0
    if reads.steps is not None:
        (waited_us,) = _WAITED.unpack_from(data, at)
        at += _WAITED.size
    if not checksums:
        return Tail(unchanged, None, waited_us)
    body = memoryview(data)[: -_DIGEST.size]
    if _DIGEST.unpack_from(data, len(body))[0] != xxhash.xxh3_64_intdigest(bytes(sent) + bytes(body)):
        raise BadFrameError("an answer was damaged on its way")
    return Tail(unchanged, np.frombuffer(body, "<u8", offset=at).astype(np.uint64), waited_us)


def source_spans(blocks: Bytes, ids: Ids, steps: Sequence[Segments]) -> Spans:
    """Return where what is read lies, step by step and block by block, neighbours joined."""
    return _spans(blocks, ids, [each[:, 0] for each in steps], [each[:, 2] for each in steps])


def target_spans(blocks: Bytes, ids: Ids, steps: Sequence[Segments]) -> Spans:
    """Return where it goes, step by step and block by block, neighbours joined."""
    return _spans(blocks, ids, [each[:, 1] for each in steps], [each[:, 2] for each in steps])


def step_sizes(steps: Sequence[Segments]) -> npt.NDArray[np.uint64]:
    """Return how many bytes of a block each step has, uint64 [steps]."""
    return np.array([int(segments[:, 2].sum()) for segments in steps], np.uint64)


def _views(blocks: Bytes, ids: Ids, offsets: Numbers, sizes: Numbers) -> list[memoryview]:
    begins, ends = _runs(ids * blocks.shape[1], [offsets], [sizes])
    flat = blocks.reshape(-1).data
    return [flat[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


def _spans(blocks: Bytes, ids: Ids, offsets: Sequence[Numbers], sizes: Sequence[Numbers]) -> Spans:
    begins, ends = _runs(ids * blocks.shape[1] + address_of(blocks), offsets, sizes)
    return np.stack((begins, ends - begins), axis=1).astype(np.uint64)


def _runs(bases: Numbers, offsets: Sequence[Numbers], sizes: Sequence[Numbers]) -> tuple[Numbers, Numbers]:
    """First and end byte of each run of neighbours, step by step and block by block; ``bases``: where blocks begin."""
    if len({len(each) for each in offsets}) == 1:  # as a rule: all steps at once
        begins = (bases[:, None] + np.stack(offsets)[:, None, :]).ravel()
        ends = begins + np.repeat(np.stack(sizes)[:, None, :], len(bases), axis=1).ravel()
    else:
        begins = np.concatenate([(bases[:, None] + each).ravel() for each in offsets])
        ends = begins + np.concatenate([np.tile(each, len(bases)) for each in sizes])
    inner = begins[1:] != ends[:-1]
    if inner.all():
        return begins, ends
    return begins[np.concatenate(([True], inner))], ends[np.concatenate((inner, [True]))]
