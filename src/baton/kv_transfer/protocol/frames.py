"""Frames: what every byte stream of Baton's transport is cut into.

A frame is a header of 16 bytes (magic, version, kind, reserved, payload length; little-endian) and its payload.
The length is checked against the receiver's bound for that kind before a byte of it is allocated or read. Control
payloads are JSON objects (a bounded parser without code), bulk payloads have layouts given where they are used.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Mapping
from typing import Any

from baton.errors import BatonError, PipeClosedError, TransferError, all_errors
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.sockets import Buffer, Stream

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
    message, field = fields.get("message"), fields.get("field")
    cls = all_errors().get(str(fields.get("code")), TransferError)
    return cls(
        message if isinstance(message, str) else "the peer refused without a reason",
        field=field if isinstance(field, str) else None,
    )
