"""How messages of clients are read.

gRPC would read a message of up to the bound of services, and decode it on the event loop, before a handler sees it.
Here the account's limits are asked before anything is read, few messages of a tenant are read at once, and one is
decoded when its length and the number of its fields are known to be in bounds.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError, Message

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.errors import InvalidRequestError, QueueFullError
from baton.rpc.audit import peer_of
from baton.rpc.server import read_message
from baton_router.frontend.grpc.servicer import SERVICE, RouterServicer
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.turns import TurnThreads
from baton_router.types import Account

_PROMPTS: dict[str, type[Message]] = {"Generate": router_pb2.RouterGenerateRequest, "Route": router_pb2.RouteRequest}
"""Methods with prompts, which count against limits."""
_OTHERS: dict[str, type[Message]] = {
    "NoteDirect": router_pb2.NoteDirectRequest,
    "ListModels": router_pb2.ListModelsRequest,
    "Explain": router_pb2.ExplainRequest,
}
_SMALL_BYTES = 64 * 1024
"""Longest message without a prompt, and longest one that is decoded on the event loop."""
_READ_AT_ONCE = 2
_READ_S = 30.0
MAX_UNREAD_CALLS = 512
"""Most calls of a tenant whose messages are not read yet; as much as a window of each lies in gRPC's memory."""
UNREAD_S = 10.0
"""Seconds after which a call whose client does not read is cancelled: its sequences would keep others waiting."""
_MAX_FIELDS = 65_536
"""Most fields of a message, those of the messages in it included; packed numbers are one field."""
_BYTES_PER_TOKEN = 4.0


class Intake:
    """Reads the messages of clients' calls.

    Args:
        servicer: Answers them.
        processor: Knows the limits.
        max_bytes: Returns the longest message with a prompt, in bytes.
    """

    def __init__(self, servicer: RouterServicer, processor: InputProcessor, max_bytes: Callable[[], int]) -> None:
        self._servicer = servicer
        self._processor = processor
        self._max_bytes = max_bytes
        self._unread: Counter[str] = Counter()
        self._reading: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._threads = TurnThreads(1, "message decoder", "large messages decoded")

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the whole service to a server."""
        found = _Handlers()
        router_pb2_grpc.add_RouterServiceServicer_to_server(self._servicer, found)  # type: ignore[arg-type]
        handlers = {
            name: self._reads(name, handler) if name in _PROMPTS or name in _OTHERS else handler
            for name, handler in found.handlers.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        server.add_registered_method_handlers(SERVICE, handlers)  # type: ignore[attr-defined]

    def _reads(self, name: str, handler: Any) -> Any:
        """Return a handler that gets its message from here instead of from gRPC."""

        async def whole(_: object, context: Any) -> Any:
            return await handler.unary_unary(await self._read(name, context), context)

        async def stream(_: object, context: Any) -> AsyncIterator[Any]:
            async with aclosing(handler.unary_stream(await self._read(name, context), context)) as responses:
                call = asyncio.current_task()
                assert call is not None  # gRPC runs every call in a task
                loop = asyncio.get_running_loop()
                async for response in responses:
                    # It goes on when the response is written, which a client that does not read holds up.
                    unread = loop.call_later(UNREAD_S, call.cancel)
                    try:
                        yield response
                    finally:
                        unread.cancel()

        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(whole, None, handler.response_serializer)
        return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)

    async def _read(self, name: str, context: Any) -> Message:
        account = self._servicer.account(context)
        if name in _PROMPTS:
            self._processor.check_limits(account)
        tenant = account.name if account is not None else peer_of(context).rpartition(":")[0]
        reading = self._reading.get(tenant)
        if reading is None:
            reading = self._reading[tenant] = asyncio.Semaphore(_READ_AT_ONCE)
        if self._unread[tenant] >= MAX_UNREAD_CALLS:
            message = f"{MAX_UNREAD_CALLS} requests of this tenant are arriving already, as many as may at once"
            raise QueueFullError(message, retry_after_s=1.0)
        self._unread[tenant] += 1
        try:
            return await self._read_one(name, context, account, tenant, reading)
        finally:
            self._unread[tenant] -= 1
            if not self._unread[tenant]:
                del self._unread[tenant]

    async def _read_one(
        self,
        name: str,
        context: Any,
        account: Account | None,
        tenant: str,
        reading: asyncio.Semaphore,
    ) -> Message:
        async with reading:
            data = await read_message(context, _READ_S)
            kind = _PROMPTS.get(name)
            if kind is None:
                _check_length(data, _SMALL_BYTES)
                return _decode(_OTHERS[name], data)
            if len(data) <= _SMALL_BYTES:
                return _decode(kind, data)
            # It counts against the limits even if it is refused.
            with self._processor.charge(account, len(data) / _BYTES_PER_TOKEN) as charge:
                _check_length(data, self._max_bytes())
                message = await self._threads.run(tenant, functools.partial(_decode_large, kind, data))
                self._servicer.check_sizes(message)
                charge.drop()  # what follows is counted by itself
            return message


class _Handlers:
    """Stands for a server, to get at the generated handlers."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Ignore them: the registered ones are the same."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Remember the handlers by the names of their methods."""
        self.handlers = handlers


def _check_length(data: bytes, most: int) -> None:
    if len(data) > most:
        raise InvalidRequestError(f"the message has {len(data)} bytes, at most {most} are taken")


def _decode_large(kind: type[Message], data: bytes) -> Message:
    check_fields(data, kind.DESCRIPTOR, _MAX_FIELDS)
    return _decode(kind, data)


def _decode(kind: type[Message], data: bytes) -> Message:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequestError("the message cannot be read") from error


def check_fields(data: bytes, kind: Any, most: int) -> None:
    """Count the fields of an encoded message, without decoding it.

    Args:
        data: The message.
        kind: Descriptor of the message's type.
        most: Most fields, those of the messages in it included.

    Raises:
        InvalidRequestError: There are more, or the message cannot be read.
    """
    count = 0
    parts = [(0, len(data), kind)]
    try:
        while parts:
            at, end, kind = parts.pop()
            while at < end:
                count += 1
                if count > most:
                    raise InvalidRequestError(f"the message has more than {most} fields and entries of lists")
                key, at = _varint(data, at)
                match key & 7:
                    case 0:
                        _, at = _varint(data, at)
                    case 1:
                        at += 8
                    case 2:
                        size, at = _varint(data, at)
                        field = kind.fields_by_number.get(key >> 3)
                        if field is not None and field.message_type is not None:
                            parts.append((at, at + size, field.message_type))
                        at += size
                    case 5:
                        at += 4
                    case _:
                        raise InvalidRequestError("the message has groups, which proto3 does not have")
    except IndexError as error:
        raise InvalidRequestError("the message cannot be read") from error


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and the place behind it; raises ``IndexError`` where none ends."""
    value = data[at]
    at += 1
    if value < 0x80:
        return value, at
    value &= 0x7F
    shift = 7
    while shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise IndexError
