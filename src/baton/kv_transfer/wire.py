"""Frames: what every byte stream of Baton's transport is cut into.

A frame is a header of 16 bytes (magic, version, kind, reserved, payload length; little-endian) and its payload.
The length is checked against the receiver's bound for that kind before a byte of it is allocated or read. Control
payloads are JSON objects (a bounded parser without code), bulk payloads have layouts given where they are used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import hmac
import json
import logging
import secrets
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from baton.errors import (
    BatonError,
    FingerprintMismatchError,
    InvalidRequestError,
    PipeClosedError,
    StaleBlockError,
    TransferError,
    UnauthenticatedError,
    all_errors,
)
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import LayerShape
from baton.kv_cache.reshard import Segments
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.streams import Buffer, Stream, Wait
from baton.kv_transfer.types import MAX_BLOCKS_PER_READ, MAX_SEGMENTS, MAX_STEPS, BlockReads, Bytes, Ids, Valid
from baton.native import address_of
from baton.rpc.service_token import Token

MAGIC = b"BTNP"
VERSION = 1
HEADER = struct.Struct("<4sBBHQ")
MAX_CONTROL_BYTES = 256 << 10
MAX_ERROR_BYTES = 16 << 10


class FrameKind(enum.IntEnum):
    """What a frame says."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    ERROR = 4
    READ = 5
    BLOCKS = 6
    TENSORS = 7
    WAIT = 8
    PROGRESS = 9
    READ_DONE = 10


class BadFrameError(TransferError):
    """The peer does not speak this protocol, or not within its bounds."""

    code = "bad_frame"


def pack_header(kind: FrameKind, length: int) -> bytes:
    """Write a frame's header for a payload of ``length`` bytes."""
    return HEADER.pack(MAGIC, VERSION, kind, 0, length)


def parse_header(data: Buffer, allowed: Mapping[FrameKind, int]) -> tuple[FrameKind, int]:
    """Read a frame's header.

    Args:
        data: 16 bytes.
        allowed: Largest payload (bytes) per kind that may come now.

    Raises:
        BadFrameError: Foreign bytes, another version, an unexpected kind or too long a payload.
    """
    magic, version, kind, reserved, length = HEADER.unpack(data)
    if magic != MAGIC or reserved != 0:
        raise BadFrameError("the peer does not speak Baton's pipe protocol")
    if version != VERSION:
        raise BadFrameError(f"the peer speaks pipe protocol {version}, this side {VERSION}", field="protocol")
    if kind not in allowed:
        raise BadFrameError(f"a frame of kind {kind} was not expected here")
    if length > allowed[FrameKind(kind)]:
        raise BadFrameError(f"a frame of {length} bytes is longer than the {allowed[FrameKind(kind)]} allowed")
    return FrameKind(kind), length


def send_control(stream: Stream, kind: FrameKind, fields: Mapping[str, Any], wait: Wait) -> None:
    """Send a frame whose payload is a JSON object."""
    payload = json.dumps(fields, separators=(",", ":")).encode()
    stream.send_all([pack_header(kind, len(payload)), payload], wait, f"sending {kind.name}")


def recv_header(stream: Stream, allowed: Mapping[FrameKind, int], wait: Wait) -> tuple[FrameKind, int]:
    """Receive a frame's header; an ERROR frame, always allowed, is raised as the error it carries."""
    head = stream.recv_exact(HEADER.size, wait, "waiting for a frame")
    kind, length = parse_header(head, {**allowed, FrameKind.ERROR: MAX_ERROR_BYTES})
    if kind is FrameKind.ERROR:
        raise error_from_fields(parse_object(stream.recv_exact(length, wait, "reading an error")))
    return kind, length


def recv_control(stream: Stream, kind: FrameKind, wait: Wait) -> dict[str, Any]:
    """Receive a control frame of one kind.

    Raises:
        BadFrameError: Something else came.
        BatonError: The peer sent this error.
    """
    _, length = recv_header(stream, {kind: MAX_CONTROL_BYTES}, wait)
    return parse_object(stream.recv_exact(length, wait, f"reading {kind.name}"))


def parse_object(payload: Buffer) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        BadFrameError: It is none.
    """
    try:
        fields = json.loads(bytes(payload))
    except (ValueError, RecursionError) as error:
        raise BadFrameError("a control frame is not JSON") from error
    if not isinstance(fields, dict):
        raise BadFrameError("a control frame is not a JSON object")
    return fields


def send_error(stream: Stream, error: BatonError, wait: Wait) -> None:
    """Tell the peer why it gets nothing; a peer that is gone already needs no word."""
    fields = {"code": error.code, "message": error.message[:2000], "field": error.field}
    try:
        send_control(stream, FrameKind.ERROR, fields, wait)
    except PipeClosedError:
        return


def error_from_fields(fields: Mapping[str, Any]) -> BatonError:
    """Rebuild an error that a peer sent; an unknown code becomes a ``TransferError``."""
    message = fields.get("message")
    field = fields.get("field")
    cls = all_errors().get(str(fields.get("code")), TransferError)
    return cls(
        message if isinstance(message, str) else "the peer refused without a reason",
        field=field if isinstance(field, str) else None,
    )


log = logging.getLogger(__name__)
HANDSHAKE_S = 5.0
"""Seconds a new peer has for its handshake."""
NONCE_BYTES = 32
PURPOSE_READ = "read"
PURPOSE_MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class Facts:
    """What two sides of a block transfer compare.

    Attributes:
        epoch: Epoch of the source.
        fingerprint: Fingerprint of this side's KV; the other side's may be divided in another way.
        num_blocks: Number of blocks in the source's arenas.
        source: At the reader, the source's fingerprint as described before; the source must confirm it.
    """

    epoch: bytes
    fingerprint: Fingerprint
    num_blocks: int
    source: Fingerprint | None = None

    def to_fields(self) -> dict[str, Any]:
        """Write as JSON-ready fields."""
        return {
            "epoch": self.epoch.hex(),
            "digest": self.fingerprint.digest().hex(),
            "fingerprint": _fingerprint_fields(self.fingerprint),
            "num_blocks": self.num_blocks,
        }

    def require(self, fields: Mapping[str, Any], *, who: str) -> Fingerprint:
        """Compare with what the other side said; returns its fingerprint.

        Raises:
            StaleBlockError: Another epoch: the instance was restarted.
            FingerprintMismatchError: Names the field that differs.
            BadFrameError: A field is missing or malformed.
        """
        if fields.get("epoch") != self.epoch.hex():
            raise StaleBlockError("the blocks belong to another epoch: their instance was restarted", field="epoch")
        theirs = fingerprint_from_fields(fields.get("fingerprint"))
        if self.source is not None:
            self.fingerprint.require_source(theirs, who=who)
        else:
            self.fingerprint.require_reader(theirs, who=who)
        if fields.get("digest") != theirs.digest().hex():
            raise FingerprintMismatchError(
                f"the {who}'s fingerprint is not the one it made a digest of", field="digest"
            )
        if self.source is not None and self.source.digest() != theirs.digest():
            raise FingerprintMismatchError(
                f"the {who} was described otherwise than it says itself", field="fingerprint"
            )
        if fields.get("num_blocks") != self.num_blocks:
            there = f"{fields.get('num_blocks')!r:.80}"
            raise FingerprintMismatchError(
                f"KV of the {who} differs in num_blocks: {self.num_blocks} here, {there} there", field="num_blocks"
            )
        return theirs


def greet_as_client(
    stream: Stream, token: Token | None, wait: Wait, *, purpose: str, facts: Facts | None
) -> Fingerprint | None:
    """Introduce this side and check the server; returns its fingerprint where ``facts`` are compared.

    Raises:
        UnauthenticatedError: The tokens differ.
        StaleBlockError, FingerprintMismatchError: As :meth:`Facts.require` says, whichever side finds it first.
    """
    challenge = _nonce(recv_control(stream, FrameKind.CHALLENGE, wait))
    mine = secrets.token_bytes(NONCE_BYTES)
    key = _keys(token)[0]
    fields = {"nonce": mine.hex(), "proof": _proof(key, b"client", challenge, mine), "purpose": purpose}
    send_control(stream, FrameKind.HELLO, fields | (facts.to_fields() if facts else {}), wait)
    welcome = recv_control(stream, FrameKind.WELCOME, wait)
    _check_proof(welcome, [key], b"server", challenge, mine)
    return facts.require(welcome, who="source") if facts is not None else None


def greet_as_server(stream: Stream, token: Token | None, wait: Wait, *, purpose: str, facts: Facts | None) -> None:
    """Challenge a client, check what it says and answer.

    Raises:
        UnauthenticatedError: The tokens differ.
        BadFrameError: The peer said something else.
        StaleBlockError, FingerprintMismatchError: As :meth:`Facts.require` says.
    """
    challenge = secrets.token_bytes(NONCE_BYTES)
    send_control(stream, FrameKind.CHALLENGE, {"nonce": challenge.hex()}, wait)
    hello = recv_control(stream, FrameKind.HELLO, wait)
    theirs = _nonce(hello)
    key = _check_proof(hello, _keys(token), b"client", challenge, theirs)
    if hello.get("purpose") != purpose:
        raise BadFrameError(f"this endpoint serves {purpose}", field="purpose")
    if facts is not None:
        facts.require(hello, who="reader")
    answer = {"proof": _proof(key, b"server", challenge, theirs)}
    send_control(stream, FrameKind.WELCOME, answer | (facts.to_fields() if facts else {}), wait)


def greet_or_refuse(stream: Stream, token: Token | None, wait: Wait) -> bool:
    """Shake hands with a new peer that wants to exchange messages; ``False``: it was sent away."""
    try:
        greet_as_server(stream, token, wait, purpose=PURPOSE_MESSAGES, facts=None)
    except BatonError as error:
        log.warning("%s was sent away: %s", stream.peer, str(error))
        with contextlib.suppress(BatonError):  # it may not even listen
            send_error(stream, error, Wait(time.monotonic() + 1.0))
        stream.close()
        return False
    return True


def _fingerprint_fields(fingerprint: Fingerprint) -> dict[str, Any]:
    """Return a fingerprint's fields; peers of before recurrent states know no ``states``, which are then left out."""
    fields = dataclasses.asdict(fingerprint)
    if not fingerprint.states:
        del fields["states"]
    return fields


def fingerprint_from_fields(fields: object) -> Fingerprint:
    """Rebuild a fingerprint from JSON fields.

    Raises:
        BadFrameError: A field is missing, unknown or of another type.
    """
    types = {"str": str, "int": int, "bool": bool}
    declared = {item.name: types.get(str(item.type)) for item in dataclasses.fields(Fingerprint)}
    if not isinstance(fields, dict) or {*fields, "states"} != set(declared):
        raise BadFrameError("the peer's fingerprint has other fields", field="fingerprint")
    values: dict[str, Any] = {"states": "", **fields}
    for name, kind in declared.items():
        if kind is not None and (type(values[name]) is not kind or not _is_plain(values[name])):
            raise BadFrameError(f"the peer's fingerprint is malformed in {name}", field=name)
    shapes = values["layer_shapes"]
    names = {item.name for item in dataclasses.fields(LayerShape)}
    if not isinstance(shapes, list) or not all(
        isinstance(s, dict) and set(s) == names and all(type(v) is int and _is_plain(v) for v in s.values())
        for s in shapes
    ):
        raise BadFrameError("the peer's fingerprint is malformed in layer_shapes", field="layer_shapes")
    values["layer_shapes"] = tuple(LayerShape(**shape) for shape in shapes)
    for name in ("unsplit_layers", "layer_groups"):
        numbers = values[name]
        if not isinstance(numbers, list) or not all(type(number) is int and _is_plain(number) for number in numbers):
            raise BadFrameError(f"the peer's fingerprint is malformed in {name}", field=name)
        values[name] = tuple(numbers)
    return Fingerprint(**values)


def _is_plain(value: str | int) -> bool:
    """Whether a value is one that a digest can be made of: JSON has halves of characters, and numbers of any size."""
    if isinstance(value, int):
        return 0 <= value < 1 << 63
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _nonce(fields: Mapping[str, Any]) -> bytes:
    try:
        nonce = bytes.fromhex(fields["nonce"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadFrameError("the peer's nonce is malformed", field="nonce") from error
    if len(nonce) != NONCE_BYTES:
        raise BadFrameError("the peer's nonce has another length", field="nonce")
    return nonce


def _keys(token: Token | None) -> Sequence[bytes]:
    return (b"none",) if token is None else token.keys(b"pipe")


def _proof(key: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> str:
    return hmac.new(key, role + server_nonce + client_nonce, hashlib.sha256).hexdigest()


def _check_proof(
    fields: Mapping[str, Any], keys: Sequence[bytes], role: bytes, server_nonce: bytes, client_nonce: bytes
) -> bytes:
    """Return the key that a peer's proof was made with."""
    proof = fields.get("proof")
    if isinstance(proof, str):
        given = proof.encode("utf-8", "surrogatepass")
        for key in keys:
            if hmac.compare_digest(given, _proof(key, role, server_nonce, client_nonce).encode()):
                return key
    raise UnauthenticatedError("the peer does not know this side's shared token", field="token")


_HEAD = struct.Struct("<IIIII")
_DIGEST = struct.Struct("<Q")
_WAITED = struct.Struct("<Q")
_CHECKSUMS = 1
_STREAMS_SHIFT = 8
_STREAMS_MASK = 255
_BYTES_PER_ENTRY = 4 + 8
_BYTES_PER_SEGMENT = 16
_BYTES_PER_STEP = 16
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
        reads: Blocks and segments to read.
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
    flat = blocks.reshape(-1).data
    size = blocks.shape[1]
    if len(offsets) == 1:
        first = int(offsets[0])
        count = int(sizes[0])
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
    size = -(-len(reads) // 8)
    num_steps = 1
    if reads.steps is not None:
        size = size + _WAITED.size
        num_steps = len(reads.steps)
    return size + (8 * num_steps * num_sent + _DIGEST.size if checksums else 0)


def parse_tail(reads: BlockReads, sent: Buffer, data: Buffer, *, checksums: bool) -> Tail:
    """Read a tail of the right length; ``sent``: the answer's first bitmap.

    Raises:
        BadFrameError: It was damaged on its way.
    """
    at = -(-len(reads) // 8)
    unchanged = unpack_bits(memoryview(data)[:at], len(reads))
    waited_us = 0
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
