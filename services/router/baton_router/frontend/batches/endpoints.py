"""``/v1/files`` and ``/v1/batches``."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from baton.errors import (
    BusyError,
    CancelledError,
    InvalidRequestError,
    NotFoundError,
    QueueFullError,
    shown,
)
from baton_router.frontend.batches.multipart import FormPart, MultipartParser, boundary_of
from baton_router.frontend.batches.schemas import (
    ENDPOINTS,
    LEAST_KEPT_S,
    MOST_KEPT_S,
    Batch,
    BatchErrors,
    BatchList,
    CreateBatchBody,
    DeletedFile,
    File,
    FileList,
    RequestCounts,
)
from baton_router.frontend.batches.store import (
    BATCH_PREFIX,
    FILE_PREFIX,
    KEEP_S,
    OPEN_STATES,
    PART_BYTES,
    UPLOADING,
    BatchRecord,
    BatchStore,
    FileRecord,
    Usage,
    new_id,
    read_content,
)
from baton_router.frontend.http.middleware import account_of
from baton_router.frontend.http.readers import Readers
from baton_router.frontend.openai.schemas import check_metadata, invalid_field
from baton_router.types import Account

R = TypeVar("R", FileRecord, BatchRecord)
WINDOW_S = 24 * 3600
_UPLOAD_S = 3600
"""Seconds after which an upload that was not completed is removed."""
_MAX_LISTED_FILES = 10_000
_MAX_LISTED_BATCHES = 100
_MOST_REMOVED = 10
"""Ended batches that a new one removes at most."""
_MAX_FIELD_BYTES = 1024
_MAX_FIELDS = 16
_MAX_NAME_CHARS = 255
_EXPIRY = ("anchor", "seconds")
_FORM_BYTES = 64 * 1024
"""Bytes of a form beside its file."""
_NONE = "this router keeps no files and batches: start it with --batch-store"


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one tenant may keep, or what all may without API keys.

    Attributes:
        file_bytes: Most bytes of a file.
        lines: Most lines of a batch.
        files: Most files.
        tenant_bytes: Most bytes of all files.
        batches: Most batches that have not ended.
        ended_batches: Most batches that have ended; the oldest ones are removed, and their files stay.
        readers: Most files that are read at once.
    """

    file_bytes: int = 100 << 20
    lines: int = 50_000
    files: int = 500
    tenant_bytes: int = 1 << 30
    batches: int = 20
    ended_batches: int = 500
    readers: int = 32

    @property
    def bounds(self) -> Usage:
        """What a tenant may keep."""
        return Usage(self.files, self.tenant_bytes, self.batches)


class BatchEndpoints:
    """Serves ``/v1/files`` and ``/v1/batches``; both only show a tenant's own.

    Args:
        store: Store of files and batches; ``None``: there is none, and all requests are refused.
        limits: Limits of a tenant.
        upload_s: Seconds in which the next piece of an upload must arrive.
        on_change: Called with the identifier of a batch that is new or is to be cancelled.
        now: Clock, in Unix seconds.
    """

    def __init__(
        self,
        store: BatchStore | None,
        limits: BatchLimits,
        upload_s: float = 30.0,
        on_change: Callable[[str], None] = lambda ident: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._opened = store
        self._limits = limits
        self._upload_s = upload_s
        self.on_change = on_change
        self._now = now
        self._arriving: Counter[str] = Counter()
        self._readers = Readers(limits.readers, "files")

    @property
    def _store(self) -> BatchStore:
        if self._opened is None:
            raise HTTPException(501, _NONE)
        return self._opened

    # --- files ---

    async def serve_files(self, request: Request) -> Response:
        """Serve ``GET`` and ``POST`` of ``/v1/files``."""
        return await (self._upload(request) if request.method == "POST" else self._list_files(request))

    async def _upload(self, request: Request) -> Response:
        store = self._store
        tenant = _owner(account_of(request))
        length = request.headers.get("content-length", "")
        limit = self._limits.file_bytes
        if length.isdigit() and int(length) > limit + _FORM_BYTES:
            raise HTTPException(413, f"a file must be at most {limit} bytes")
        parser = MultipartParser(boundary_of(request.headers.get("content-type", "")))
        now = int(self._now())
        record = FileRecord(
            id=new_id(FILE_PREFIX),
            tenant=tenant,
            filename="",
            purpose="batch",
            status=UPLOADING,
            size=0,
            created_at=now,
            removed_at=now + _UPLOAD_S,
        )
        await store.write_record(record, bounds=self._limits.bounds)
        upload = _Upload(store, record, limit)
        try:
            await self._receive(request, parser, upload)
            record = upload.finish(now)
            if not await store.write_record(record, expected=UPLOADING, bounds=self._limits.bounds):
                raise HTTPException(408, f"the file did not arrive within {_UPLOAD_S} s")
        except BaseException:
            await asyncio.shield(store.delete(record))
            raise
        finally:
            self._arriving[tenant] -= upload.arrived
            if not self._arriving[tenant]:
                del self._arriving[tenant]
        return _answer(_file_object(record))

    async def _receive(self, request: Request, parser: MultipartParser, upload: _Upload) -> None:
        pieces = request.stream().__aiter__()
        try:
            while not parser.done:
                async with asyncio.timeout(self._upload_s):
                    data = await anext(pieces, b"")
                if not data:
                    break
                for event in parser.feed(data):
                    await upload.add(event)
                self._arriving[upload.record.tenant] += len(data)
                upload.arrived += len(data)
                if self._arriving[upload.record.tenant] > self._limits.tenant_bytes + _FORM_BYTES:
                    raise QueueFullError("more bytes of this tenant's files arrive at once than it may have in all")
        except TimeoutError as error:
            raise HTTPException(408, f"the file did not go on for {self._upload_s:g} s") from error
        except ClientDisconnect as error:
            raise CancelledError("the client has gone") from error
        if not parser.done:
            raise InvalidRequestError("the form ends before its last boundary", field="file")
        await upload.flush()

    async def serve_file(self, request: Request) -> Response:
        """Serve ``GET`` and ``DELETE`` of ``/v1/files/{file_id}``."""
        record = await self._file(request)
        if request.method != "DELETE":
            return _answer(_file_object(record))
        for ident, state in (await self._store.batch_states(record.tenant)).items():
            batch = await self._store.get(ident) if state in OPEN_STATES else None
            if isinstance(batch, BatchRecord) and batch.input_file_id == record.id and batch.status in OPEN_STATES:
                raise BusyError(f"file_id: the batch {ident} reads this file", field="file_id")
        await self._store.delete(record)
        return _answer(DeletedFile(id=record.id))

    async def read_file(self, request: Request) -> Response:
        """Serve ``GET /v1/files/{file_id}/content``."""
        record = await self._file(request)
        self._readers.check(record.tenant)
        content = read_content(self._store, record.id)
        return self._readers.stream(content, record.size, record.tenant, "application/jsonl")

    async def _list_files(self, request: Request) -> Response:
        query = request.query_params
        purpose = query.get("purpose")
        records = await self._files(_owner(account_of(request)))
        files = {x.id: x for x in records if x.status != UPLOADING and purpose in (None, x.purpose)}
        page, has_more = _page(list(files), query, _MAX_LISTED_FILES, _MAX_LISTED_FILES)
        data = [_file_object(files[ident]) for ident in page]
        first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
        return _answer(FileList(data=data, has_more=has_more, first_id=first_id, last_id=last_id))

    async def _file(self, request: Request) -> FileRecord:
        ident = request.path_params["file_id"]
        return await self._find(FileRecord, ident, _owner(account_of(request)), "file_id", "file")

    # --- batches ---

    async def create(self, body: CreateBatchBody, account: Account | None) -> Any:
        """Serve ``POST /v1/batches``."""
        store = self._store
        tenant = _owner(account)
        if body.endpoint not in ENDPOINTS:
            raise invalid_field("endpoint", f"must be one of {', '.join(ENDPOINTS)}, got {shown(body.endpoint)}")
        if body.completion_window != "24h":
            raise invalid_field("completion_window", f"must be 24h, got {shown(body.completion_window)}")
        check_metadata(body.metadata)
        expiry = body.output_expires_after
        kept_s = KEEP_S if expiry is None else _kept_s(expiry, "output_expires_after", "output_expires_after.{}")
        file = await self._find(FileRecord, body.input_file_id, tenant, "input_file_id", "file")
        if file.purpose != "batch":
            raise invalid_field("input_file_id", f"must be a file of purpose batch, not {file.purpose}")
        now = int(self._now())
        record = BatchRecord(
            id=new_id(BATCH_PREFIX),
            tenant=tenant,
            status="validating",
            endpoint=body.endpoint,
            input_file_id=file.id,
            output_id=new_id(FILE_PREFIX),
            error_id=new_id(FILE_PREFIX),
            created_at=now,
            expires_at=now + WINDOW_S,
            removed_at=now + WINDOW_S + KEEP_S,
            output_s=kept_s,
            metadata=body.metadata,
        )
        await store.write_record(record, bounds=self._limits.bounds)
        self.on_change(record.id)
        ended = [ident for ident, state in (await store.batch_states(tenant)).items() if state not in OPEN_STATES]
        for ident in ended[: min(_MOST_REMOVED, max(0, len(ended) - self._limits.ended_batches + 1))]:
            if (oldest := await store.get(ident)) is not None:
                await store.delete(oldest)
        return msgspec.to_builtins(await self._batch_object(record))

    async def serve_batch(self, request: Request) -> Response:
        """Serve ``GET /v1/batches/{batch_id}``."""
        return _answer(await self._batch_object(await self._batch(request)))

    async def cancel(self, request: Request) -> Response:
        """Serve ``POST /v1/batches/{batch_id}/cancel``."""
        while True:  # again if its state changes meanwhile
            record = await self._batch(request)
            if record.status == "cancelling":
                break
            if record.status not in ("validating", "in_progress"):
                raise BusyError(f"batch_id: a batch that is {record.status} cannot be cancelled", field="batch_id")
            times = {**record.times, "cancelling_at": int(self._now())}
            changed = msgspec.structs.replace(record, status="cancelling", times=times)
            if await self._store.write_record(changed, expected=record.status):
                record = changed
                break
        self.on_change(record.id)
        return _answer(await self._batch_object(record))

    async def list_batches(self, request: Request) -> Response:
        """Serve ``GET /v1/batches``; ``POST`` is served by the protocol."""
        idents = list(await self._store.batch_states(_owner(account_of(request))))
        page, has_more = _page(idents, request.query_params, 20, _MAX_LISTED_BATCHES)
        records = [await self._store.get(ident) for ident in page]
        data = [await self._batch_object(each) for each in records if isinstance(each, BatchRecord)]
        first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
        return _answer(BatchList(data=data, has_more=has_more, first_id=first_id, last_id=last_id))

    async def _batch(self, request: Request) -> BatchRecord:
        ident = request.path_params["batch_id"]
        return await self._find(BatchRecord, ident, _owner(account_of(request)), "batch_id", "batch")

    async def _batch_object(self, record: BatchRecord) -> Batch:
        completed, failed = record.completed, record.failed
        if record.status in OPEN_STATES:
            completed, failed = [(await self._store.measure(x)).lines for x in (record.output_id, record.error_id)]
        times: dict[str, Any] = {**record.times}
        return Batch(
            id=record.id,
            endpoint=record.endpoint,
            errors=BatchErrors(data=record.errors) if record.errors else None,
            input_file_id=record.input_file_id,
            status=record.status,  # type: ignore[arg-type]
            output_file_id=record.output_id if record.completed else None,
            error_file_id=record.error_id if record.failed else None,
            created_at=record.created_at,
            expires_at=record.expires_at,
            request_counts=RequestCounts(total=record.total, completed=completed, failed=failed),
            usage=record.usage,
            metadata=record.metadata,
            **times,
        )

    # --- records ---

    async def _files(self, tenant: str) -> list[FileRecord]:
        return [x for x in await self._store.list_records(FILE_PREFIX, tenant) if isinstance(x, FileRecord)]

    async def _find(self, kind: type[R], ident: str, tenant: str, field: str, what: str) -> R:
        """Return a record of the tenant.

        Raises:
            NotFoundError: It has none of this identifier.
        """
        record = await self._store.get(ident)
        if not isinstance(record, kind) or record.tenant != tenant or record.status == UPLOADING:
            raise NotFoundError(f"{field}: there is no {what} {shown(ident)} here (any more)", field=field)
        return record


class _Upload:
    """A form as it arrives: its fields, and its file in the store.

    Args:
        store: Store of the file.
        record: The file.
        limit: Most bytes of the file.

    Attributes:
        record: The file.
        arrived: Bytes of the form so far.
    """

    def __init__(self, store: BatchStore, record: FileRecord, limit: int) -> None:
        self._store = store
        self.record = record
        self._limit = limit
        self._fields: dict[str, bytearray] = {}
        self._current: bytearray | None = None
        self._filename: str | None = None
        self._data = bytearray()
        self._size = self._num_parts = 0
        self.arrived = 0

    async def add(self, event: FormPart | bytes) -> None:
        """Add what the parser found."""
        if isinstance(event, FormPart):
            if event.name == "file":
                if self._filename is not None or event.filename is None:
                    raise invalid_field("file", "must be one file with a name")
                self._filename = event.filename
                self._current = None
            elif event.name in self._fields:
                raise invalid_field(event.name[:_MAX_NAME_CHARS], "is given more than once")
            elif len(self._fields) < _MAX_FIELDS:
                self._current = self._fields[event.name] = bytearray()
            else:
                raise InvalidRequestError("the form has too many fields", field="file")
        elif self._current is not None:
            self._current += event
            if len(self._current) > _MAX_FIELD_BYTES:
                raise InvalidRequestError("a field of the form is too long", field=next(reversed(self._fields)))
        else:
            self._size += len(event)
            if self._size > self._limit:
                raise HTTPException(413, f"a file must be at most {self._limit} bytes")
            self._data += event
            while len(self._data) >= PART_BYTES:
                await self.flush()

    async def flush(self) -> None:
        """Write a part, or what is left of the file."""
        if self._data:
            self._num_parts += 1
            data = bytes(self._data[:PART_BYTES])
            del self._data[:PART_BYTES]
            await self._store.write_part(self.record.id, self._num_parts, data)

    def finish(self, now: int) -> FileRecord:
        """Return the record of the complete file.

        Raises:
            InvalidRequestError: A field is wrong or missing; names it.
        """
        fields = {name: value.decode(errors="replace") for name, value in self._fields.items()}
        if self._filename is None:
            raise invalid_field("file", "is missing")
        if (purpose := fields.get("purpose")) != "batch":
            raise invalid_field("purpose", f"must be batch, got {shown(purpose)}")
        expiry = {name: fields[f"expires_after[{name}]"] for name in _EXPIRY if f"expires_after[{name}]" in fields}
        kept_s = _kept_s(expiry, "expires_after", "expires_after[{}]") if expiry else KEEP_S
        filename = self._filename[:_MAX_NAME_CHARS]
        return msgspec.structs.replace(
            self.record, filename=filename, size=self._size, status="processed", removed_at=now + kept_s
        )


def _kept_s(expiry: Mapping[str, Any], field: str, place: str) -> int:
    """Return the seconds of ``expires_after`` or ``output_expires_after``."""
    if unknown := expiry.keys() - set(_EXPIRY):
        raise invalid_field(place.format(min(unknown)), "is unknown")
    if expiry.get("anchor") != "created_at":
        raise invalid_field(place.format("anchor"), f"must be created_at, got {shown(expiry.get('anchor'))}")
    seconds = expiry.get("seconds")
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and len(seconds) < 10:
        seconds = int(seconds)
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not LEAST_KEPT_S <= seconds <= MOST_KEPT_S:
        raise invalid_field(place.format("seconds"), f"must be {LEAST_KEPT_S} to {MOST_KEPT_S}, got {shown(seconds)}")
    return seconds


def _page(idents: Sequence[str], query: Mapping[str, str], default: int, most: int) -> tuple[list[str], bool]:
    """Return a page of identifiers, and whether there are more.

    Args:
        idents: All identifiers, oldest first.
        query: Query of the request: ``order``, ``after``, ``limit``.
        default: Length of a page.
        most: Longest page.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid_field("order", f"must be asc or desc, got {shown(order)}")
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:6]) <= most):
        raise invalid_field("limit", f"must be between 1 and {most}, got {shown(limit)}")
    ordered = list(idents) if order == "asc" else list(reversed(idents))
    if "after" in query:
        if query["after"] not in ordered:
            raise NotFoundError(f"after: there is no {shown(query['after'])} here (any more)", field="after")
        ordered = ordered[ordered.index(query["after"]) + 1 :]
    return ordered[: int(limit)], len(ordered) > int(limit)


def _file_object(record: FileRecord) -> File:
    return File(
        id=record.id,
        bytes=record.size,
        created_at=record.created_at,
        expires_at=record.removed_at,
        filename=record.filename,
        purpose=record.purpose,  # type: ignore[arg-type]
    )


def _answer(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _owner(account: Account | None) -> str:
    return "" if account is None else account.name
