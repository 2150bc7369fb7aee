"""What ``/v1/files`` and ``/v1/batches`` take and answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from baton_router.frontend.openai.schemas import METADATA_SCHEMA, Body, object_schema, or_null

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Endpoints that batches may name."""
LEAST_KEPT_S = 3600
MOST_KEPT_S = 30 * 24 * 3600
_EXPIRY = object_schema(
    {
        "anchor": {"const": "created_at"},
        "seconds": {"type": "integer", "minimum": LEAST_KEPT_S, "maximum": MOST_KEPT_S},
    }
)
UPLOAD_FORM = object_schema(
    {"file": {"type": "string", "contentMediaType": "application/octet-stream"}, "purpose": {"const": "batch"}},
    **{"expires_after[anchor]": {"const": "created_at"}, "expires_after[seconds]": _EXPIRY["properties"]["seconds"]},
)
"""The form of ``POST /v1/files``."""


class CreateBatchBody(Body, kw_only=True):
    """``POST /v1/batches``."""

    described: ClassVar[Mapping[str, Any]] = {
        "endpoint": {"enum": list(ENDPOINTS)},
        "completion_window": {"const": "24h"},
        "metadata": METADATA_SCHEMA,
        "output_expires_after": or_null(_EXPIRY),
    }

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None


class File(msgspec.Struct, kw_only=True):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, kw_only=True):
    """Answers ``GET /v1/files``."""

    object: Literal["list"] = "list"
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct, kw_only=True):
    """Answers ``DELETE /v1/files/{file_id}``."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchError(msgspec.Struct, kw_only=True):
    """Why a batch failed."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(msgspec.Struct, kw_only=True):
    """The errors of a batch that failed."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, kw_only=True):
    """Lines of a batch."""

    total: int
    completed: int
    failed: int


class CachedTokens(msgspec.Struct, kw_only=True):
    """Which prompt tokens were not computed."""

    cached_tokens: int = 0


class ReasoningTokens(msgspec.Struct, kw_only=True):
    """Which tokens of answers were thoughts."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, kw_only=True):
    """Tokens of all answers of a batch that has ended."""

    input_tokens: int = 0
    input_tokens_details: CachedTokens = msgspec.field(default_factory=CachedTokens)
    output_tokens: int = 0
    output_tokens_details: ReasoningTokens = msgspec.field(default_factory=ReasoningTokens)
    total_tokens: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, kw_only=True):
    """Answers ``GET /v1/batches``."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
