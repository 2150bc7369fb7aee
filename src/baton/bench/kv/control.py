"""How the driver speaks to its agents: one JSON object per message over one of Baton's own message pipes.

An agent answers each order (``{"do": NAME, ...}``) with ``{"ok": {...}}`` or with ``{"error": ...}`` as the transport
writes errors. Objects are bounded, parsed by a parser without code, and rebuilt as dataclasses field by field.
"""

from __future__ import annotations

import dataclasses
import json
import time
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from baton.errors import BatonError, InternalError, TransferError, shown
from baton.kv_transfer.pipes.messages import TcpMessagePipe, WireTensor
from baton.kv_transfer.protocol.frames import BadFrameError, error_from_fields, parse_object
from baton.kv_transfer.protocol.sockets import Stream

T = TypeVar("T")
Fields = dict[str, Any]
Handler = Callable[[Fields], Mapping[str, Any]]
MAX_CONTROL_BYTES = 1 << 20
IDLE_S = 3600.0
"""Seconds that an agent waits for its driver's next order."""
ANSWER_S = 10.0
"""Seconds to hand an answer over."""


class Line:
    """A control line: JSON objects in order.

    Args:
        stream: A connected socket whose peer was checked (a handshake, or a socket inherited from the parent).
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._pipe = TcpMessagePipe(stream, max_message_bytes=MAX_CONTROL_BYTES)

    def send(self, fields: Mapping[str, Any], timeout_s: float = ANSWER_S) -> None:
        """Send an object.

        Raises:
            PipeClosedError, DeadlineError: As their names say.
            InvalidRequestError: It is over the bound.
        """
        data = json.dumps(fields, separators=(",", ":")).encode()
        self._pipe.send([WireTensor("uint8", (len(data),), memoryview(data))], deadline=time.monotonic() + timeout_s)

    def recv(self, timeout_s: float) -> Fields:
        """Receive an object.

        Raises:
            PipeClosedError, DeadlineError: As their names say.
            BadFrameError: Something else came.
        """
        message = self._pipe.recv(deadline=time.monotonic() + timeout_s)
        if message is None or len(message) != 1:
            raise BadFrameError("a control message is one JSON object")
        return parse_object(bytes(message[0].data))

    def close(self) -> None:
        """Close."""
        self._pipe.close()


def serve_orders(line: Line, handlers: Mapping[str, Handler]) -> None:
    """Answer orders until the driver hangs up.

    Raises:
        TransferError: The driver broke the protocol, or said nothing for ``IDLE_S``.
    """
    while True:
        order = line.recv(IDLE_S)
        handler = handlers.get(str(order.pop("do", "")))
        try:
            if handler is None:
                raise BadFrameError("an order that this agent does not know", field="do")
            answer: Fields = {"ok": dict(handler(order))}
        except BatonError as error:
            answer = {"error": {"code": error.code, "message": error.message[:2000], "field": error.field}}
        line.send(answer)


def unwrap(answer: Fields) -> Fields:
    """Return an answer's content.

    Raises:
        BatonError: The agent refused, or failed.
    """
    if isinstance(answer.get("error"), dict):
        raise error_from_fields(answer["error"])
    content = answer.get("ok")
    if not isinstance(content, dict):
        raise BadFrameError("an answer without content")
    return content


def to_fields(value: object) -> Any:
    """Write a dataclass (of dataclasses, tuples and scalars) as JSON-ready fields.

    Raises:
        InternalError: Something else is in it.
    """
    if dataclasses.is_dataclass(value):
        return {item.name: to_fields(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_fields(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise InternalError(f"{type(value).__name__} does not go over a control line")


def from_fields(cls: type[T], fields: object) -> T:
    """Rebuild a dataclass from JSON fields, strictly: every field, no other, and of the declared types.

    Raises:
        BadFrameError: Names what is wrong.
    """
    if not isinstance(fields, dict):
        raise BadFrameError(f"{cls.__name__} is not an object: {shown(fields)}")
    hints = typing.get_type_hints(cls)
    names = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if set(fields) != names:
        raise BadFrameError(f"{cls.__name__} has other fields: {shown(sorted(set(fields) ^ names))}")
    return cls(**{name: _rebuild(hints[name], fields[name], f"{cls.__name__}.{name}") for name in fields})


def _rebuild(hint: Any, value: object, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        return None if value is None else _rebuild(hint.__args__[0], value, where)
    if dataclasses.is_dataclass(hint):
        return from_fields(typing.cast(type[Any], hint), value)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)
        if not isinstance(value, list) or (inner[-1] is not ... and len(value) != len(inner)):
            raise BadFrameError(f"{where} is malformed: {shown(value)}")
        kinds = inner[:1] * len(value) if inner[-1] is ... else inner
        return tuple(_rebuild(kind, item, where) for kind, item in zip(kinds, value, strict=True))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise BadFrameError(f"{where} is malformed: {shown(value)}")
    return value


def seconds(fields: Mapping[str, Any], name: str) -> float:
    """Return a number of an answer.

    Raises:
        TransferError: It is none.
    """
    value = fields.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TransferError(f"an agent's answer has no usable {name}")
    return float(value)
