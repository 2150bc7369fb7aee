"""Errors on the wire: conversion of a :class:`BatonError` to a gRPC status with details and back.

The details travel as ``google.rpc.Status`` in ``grpc-status-details-bin``: Baton's own ``ErrorDetail`` and, where a
field is to blame, the standard ``google.rpc.BadRequest`` that generic clients understand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from baton.api.v1 import common_pb2
from baton.background import is_cancelled
from baton.errors import (
    BatonError,
    CancelledError,
    ConfigError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    QueueFullError,
    UnauthenticatedError,
    UnavailableError,
    all_errors,
)

T = TypeVar("T")

DETAILS_KEY = "grpc-status-details-bin"
STATUS_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
"""Statuses by their numbers on the wire."""
_NO_CONNECTION = "failed to connect"
_HUNG_UP = "Socket closed"
"""gRPC's message when a peer ended a handshake, which comes without a reason."""
BY_STATUS: dict[grpc.StatusCode, type[BatonError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFullError,
    grpc.StatusCode.FAILED_PRECONDITION: ConfigError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
}
"""Errors for statuses without Baton's details; all others become :class:`baton.errors.InternalError`."""


def status_code(error: BatonError) -> grpc.StatusCode:
    """Return the gRPC status code of an error."""
    return grpc.StatusCode[error.grpc_status]


def status_details(error: BatonError) -> bytes:
    """Return the serialized ``google.rpc.Status`` of an error."""
    status = status_pb2.Status(code=status_code(error).value[0], message=error.message)
    detail = common_pb2.ErrorDetail(
        code=error.code, field=error.field or "", retry_after_ms=round(1000 * (error.retry_after_s or 0))
    )
    status.details.add().Pack(detail)
    if error.field:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=error.field, description=error.message)
        status.details.add().Pack(bad)
    return bytes(status.SerializeToString())


def readable(answer: T | None) -> T:
    """Return a peer's answer, which gRPC's asyncio API replaces by ``None`` if it cannot be parsed.

    Raises:
        grpc.aio.AioRpcError: It cannot be parsed; INTERNAL, as in gRPC's other APIs.
    """
    if answer is None:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "the peer's answer cannot be read", None)
    return answer


async def call_unary(method: Callable[..., Awaitable[T | None]], request: Message, **options: Any) -> T:
    """Call a peer and return its answer.

    gRPC's asyncio API cancels calls whose channel is closed, and refuses new ones with a usage error. Both mean that
    the connection is gone, not that this task was cancelled.

    Args:
        method: Method of a stub.
        request: Request message.
        **options: Options of the call, such as ``timeout`` in seconds.

    Raises:
        grpc.aio.AioRpcError: The peer's error, or UNAVAILABLE for a closed channel.
    """
    try:
        return readable(await method(request, **options))
    except grpc.aio.UsageError as error:
        raise _closed() from error
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise _closed() from None


def _closed() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the connection was closed", None)


def from_rpc_error(error: grpc.RpcError) -> BatonError:
    """Rebuild the error that a peer raised; statuses without Baton's details map by their code."""
    call: Any = error
    details = next((value for key, value in call.trailing_metadata() or () if key == DETAILS_KEY), b"")
    return from_status(call.code(), call.details() or "", details)


def from_status(code: grpc.StatusCode, message: str, details: bytes = b"") -> BatonError:
    """Rebuild an error from its status.

    Args:
        code: Code of the status.
        message: Message of the status; empty: the name of the code.
        details: Serialized details, as :func:`status_details` makes them; empty: the status maps by its code.
    """
    rebuilt = _from_details(details) if details else None
    if rebuilt is not None:
        return rebuilt
    message = message or code.name
    if code is grpc.StatusCode.UNAVAILABLE and message.startswith(_NO_CONNECTION) and message.endswith(_HUNG_UP):
        message += " at once: does it want a certificate (--tls-cert), or one of another authority?"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        message += " (does the peer's version know this call?)"
    return BY_STATUS.get(code, InternalError)(message)


def _from_details(value: bytes) -> BatonError | None:
    item: any_pb2.Any
    try:
        status = status_pb2.Status.FromString(value)
        for item in status.details:
            detail = common_pb2.ErrorDetail()
            if item.Unpack(detail):
                cls = all_errors().get(detail.code, InternalError)
                retry = detail.retry_after_ms / 1000 if detail.retry_after_ms else None
                return cls(status.message, field=detail.field or None, retry_after_s=retry)
    except DecodeError:
        return None
    return None
