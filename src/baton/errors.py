"""Every error that Baton raises on purpose.

::

    BatonError
    ├── InvalidRequestError        the request is wrong; names the field       400  INVALID_ARGUMENT
    │   └── ContextLengthError     it does not fit into the model's context
    ├── NotFoundError              no such model, instance or request          404  NOT_FOUND
    ├── QueueFullError             no room now, try again later                429  RESOURCE_EXHAUSTED
    ├── BusyError                  it wants an idle instance                   409  FAILED_PRECONDITION
    ├── UnavailableError           no instance that could do it is there       503  UNAVAILABLE
    │   └── OverloadedError        an instance is there, but it would take longer than is allowed
    │       └── SloError           ... than the request itself wants; names ttft_ms or itl_ms
    ├── DeadlineError              it took longer than was allowed             504  DEADLINE_EXCEEDED
    ├── CancelledError             the caller went away                        499  CANCELLED
    ├── UnauthenticatedError       the token or certificate is wrong           401  UNAUTHENTICATED
    ├── PermissionDeniedError      the placement ticket is not good for this   403  PERMISSION_DENIED
    ├── FingerprintMismatchError   peers whose KV is not the same; names the field  409  FAILED_PRECONDITION
    ├── TransferError              KV bytes did not arrive                     502  UNAVAILABLE
    │   ├── PipeClosedError        the peer or the pipe is gone
    │   └── StaleBlockError        the lease had ended before the fetch had
    ├── ConfigError                a flag, file or model that cannot work      500  FAILED_PRECONDITION
    └── InternalError              Baton is at fault                           500  INTERNAL

The HTTP and gRPC codes stand here as class attributes so that no other table can disagree.
"""

from __future__ import annotations

import reprlib
from typing import ClassVar

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


class BatonError(Exception):
    """Base of all errors that Baton raises on purpose.

    Attributes:
        message: One sentence for people.
        field: Path of the offending field of the request, or ``None``.
        retry_after_s: Seconds after which trying again makes sense, or ``None``.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidRequestError(BatonError):
    """The request is wrong; ``field`` says where."""

    code = "invalid_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class ContextLengthError(InvalidRequestError):
    """Prompt and output together are longer than the model's context; a code of its own, which clients look for."""

    code = "context_length_exceeded"


class NotFoundError(BatonError):
    """No such model, instance, lease or request."""

    code = "not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class QueueFullError(BatonError):
    """A bounded queue or pool has no room now."""

    code = "queue_full"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class UnavailableError(BatonError):
    """No instance that could do it is there."""

    code = "unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class BusyError(BatonError):
    """What was asked for wants an idle instance."""

    code = "busy"
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class OverloadedError(UnavailableError):
    """Those who could do it are too busy to begin in reasonable time."""

    code = "overloaded"


class SloError(OverloadedError):
    """They are too busy, or too slow, for what the request wants; ``field`` is ``ttft_ms`` or ``itl_ms``."""

    code = "slo_unattainable"


class DeadlineError(BatonError):
    """It took longer than was allowed."""

    code = "deadline_exceeded"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class CancelledError(BatonError):
    """The caller went away or cancelled."""

    code = "cancelled"
    http_status = 499
    grpc_status = "CANCELLED"


class UnauthenticatedError(BatonError):
    """The shared token or the certificate is wrong."""

    code = "unauthenticated"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class PermissionDeniedError(BatonError):
    """The placement ticket is missing, forged, expired, used before, or for something else."""

    code = "permission_denied"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class FingerprintMismatchError(BatonError):
    """Two peers whose KV blocks are not the same thing; ``field`` names the first difference."""

    code = "fingerprint_mismatch"
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class TransferError(BatonError):
    """KV bytes did not arrive."""

    code = "transfer_failed"
    http_status = 502
    grpc_status = "UNAVAILABLE"


class PipeClosedError(TransferError):
    """The pipe or its peer is gone."""

    code = "pipe_closed"


class StaleBlockError(TransferError):
    """The blocks' lease had ended before the fetch had: what arrived must not be used."""

    code = "stale_blocks"


class ConfigError(BatonError):
    """A flag, a file or a model that cannot work."""

    code = "config"
    grpc_status = "FAILED_PRECONDITION"


INTERNAL_TEXT = "something went wrong inside Baton"
"""What callers learn of an error that is not Baton's own. Its text, which may have others' data, is in the log."""


class InternalError(BatonError):
    """Baton is at fault."""

    code = "internal"


def all_errors() -> dict[str, type[BatonError]]:
    """Return every error class by its code, the base class under ``internal`` left to ``InternalError``."""
    classes: dict[str, type[BatonError]] = {}
    todo = list(BatonError.__subclasses__())
    while todo:
        cls = todo.pop()
        if "code" in vars(cls):  # not one that has its parent's
            classes[cls.code] = cls
        todo.extend(cls.__subclasses__())
    return classes


def shown(value: object) -> str:
    """Return a received value as an error message shows it: short and on one line, however long or deep."""
    return _SHORT.repr(value)
