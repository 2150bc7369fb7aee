"""What is kept of files and batches, and the interface of the stores that keep it.

A *record* describes a file or a batch. The content of a file are its numbered *parts*: of an uploaded file the pieces
that it arrived in, of a batch's output and error file one line each, numbered as the lines of the input are. So results
are in the order of the input whenever they come, and only the first result of a line counts. Ending a batch copies
nothing: it adds the records of its two files.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import msgspec

FILE_PREFIX = "file-"
BATCH_PREFIX = "batch_"
KEEP_S = 30 * 24 * 3600
"""Seconds that files, and batches that have ended, are kept by default."""
PART_BYTES = 256 * 1024
"""Bytes of the parts of an uploaded file, and most bytes of a file that are read at once."""
_PARTS_AT_ONCE = 16
"""Parts that are asked for at once, of which :data:`PART_BYTES` bytes are read at most."""
UPLOADING = "uploading"
"""Status of a file whose content is still arriving; clients do not see it."""
OPEN_STATES = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
"""States of a batch that has not ended."""


class FileRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A file.

    Attributes:
        id: Identifier.
        tenant: Name of its owner; empty without API keys.
        filename: Name that its client gave it.
        purpose: ``batch`` for input, ``batch_output`` for output and errors.
        status: ``processed``, or :data:`UPLOADING`.
        size: Bytes of its content.
        created_at: Time of its creation, in Unix seconds.
        removed_at: Time when it is removed, in Unix seconds.
    """

    prefix: ClassVar[str] = FILE_PREFIX

    id: str
    tenant: str
    filename: str
    purpose: str
    status: str
    size: int
    created_at: int
    removed_at: int


class BatchRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A batch.

    Attributes:
        id: Identifier.
        tenant: Name of its owner; empty without API keys.
        status: One of OpenAI's eight states.
        endpoint: Path that all lines are for.
        input_file_id: Identifier of the file with the lines.
        output_id: Identifier of the file with the answers; the record of the file is made when the batch ends.
        error_id: Identifier of the file with the errors, likewise.
        created_at: Time of its creation, in Unix seconds.
        expires_at: Time when lines without a result are given up, in Unix seconds.
        removed_at: Time when the record is removed, in Unix seconds.
        output_s: Seconds that its files are kept.
        metadata: The client's own notes; ``None``: none.
        times: Times of changes of its state, by OpenAI's names of these fields, in Unix seconds.
        total: Number of lines, once they are validated.
        errors: Why validation failed, as OpenAI's ``errors.data``.
        completed: Number of lines in the output file, once the batch has ended.
        failed: Number of lines in the error file, likewise.
    """

    prefix: ClassVar[str] = BATCH_PREFIX

    id: str
    tenant: str
    status: str
    endpoint: str
    input_file_id: str
    output_id: str
    error_id: str
    created_at: int
    expires_at: int
    removed_at: int
    output_s: int = KEEP_S
    metadata: dict[str, str] | None = None
    times: dict[str, int] = msgspec.field(default_factory=dict)
    total: int = 0
    errors: list[dict[str, Any]] = msgspec.field(default_factory=list)
    completed: int = 0
    failed: int = 0


Record: TypeAlias = FileRecord | BatchRecord


class LineResult(NamedTuple):
    """The result of a line.

    Attributes:
        number: Number of the line, from 1 on.
        failed: Whether it belongs into the error file.
        data: The line of the output or error file, with its line break.
    """

    number: int
    failed: bool
    data: bytes


class FileSize(NamedTuple):
    """Parts and bytes of a file's content."""

    parts: int
    size: int


class BatchStore(Protocol):
    """Keeps files and batches. Several routers may use one.

    All methods raise ``UnavailableError`` if what is below cannot be reached or has no room.
    """

    async def write_record(self, record: Record, *, expected: str | None = None) -> bool:
        """Write a record.

        Args:
            record: The record.
            expected: Status that the stored record must have; ``None``: there must be no such record yet.

        Returns:
            Whether it was written.
        """

    async def get(self, ident: str) -> Record | None:
        """Return a record by its identifier; ``None``: there is none."""

    async def list_records(self, prefix: str, tenant: str) -> list[Record]:
        """Return a tenant's files or batches, by the prefix of their identifiers, in the order of their creation."""

    async def batch_states(self, tenant: str) -> dict[str, str]:
        """Return the states of a tenant's batches by their identifiers, in the order of their creation."""

    async def open_batches(self) -> list[BatchRecord]:
        """Return all tenants' batches that have not ended, in the order of their creation."""

    async def due_records(self, now: float) -> list[Record]:
        """Return the records that are to be removed by now, some of them if there are many."""

    async def delete(self, record: Record) -> None:
        """Remove a record, and the parts of a file."""

    async def write_part(self, file_id: str, number: int, data: bytes) -> None:
        """Write a part of an uploaded file."""

    async def add_results(self, batch: BatchRecord, results: Sequence[LineResult]) -> None:
        """Write results of lines, all or none of them; a line that has a result keeps it."""

    async def part_numbers(self, file_id: str) -> list[int]:
        """Return the numbers of a file's parts, rising."""

    async def read_parts(self, file_id: str, numbers: Sequence[int], start: int, most: int) -> list[bytes]:
        """Return parts of a file, as far as ``most`` bytes reach.

        Args:
            file_id: The file.
            numbers: Numbers of the parts, neighbours in :meth:`part_numbers`.
            start: Bytes to leave out of the first part.
            most: Bytes of all parts together.

        Returns:
            A piece per part, the last one cut at ``most`` bytes; fewer pieces if ``most`` is reached or parts are gone.
        """

    async def measure(self, file_id: str) -> FileSize:
        """Return the number and bytes of a file's parts."""

    async def claim(self, batch_id: str, owner: str, seconds: float) -> bool:
        """Lease a batch to a router, or renew its lease; ``False``: another router has it."""

    async def release(self, batch_id: str, owner: str) -> None:
        """End a router's lease, if it has it."""

    async def close(self) -> None:
        """Close connections and files; may be called any number of times."""


async def read_content(store: BatchStore, file_id: str) -> AsyncIterator[bytes]:
    """Iterate over the content of a file, of which at most :data:`PART_BYTES` bytes are in memory."""
    numbers = array("Q", await store.part_numbers(file_id))
    at = start = 0
    while at < len(numbers):
        pieces = await store.read_parts(file_id, numbers[at : at + _PARTS_AT_ONCE], start, PART_BYTES)
        if not pieces:
            return  # the file was deleted meanwhile
        content = b"".join(pieces)
        if len(content) < PART_BYTES:
            at, start = at + len(pieces), 0
        else:  # there may be more of the last part
            start = len(pieces[-1]) + (start if len(pieces) == 1 else 0)
            at += len(pieces) - 1
        del pieces
        if content:
            yield content


async def measure_tenant(store: BatchStore, tenant: str) -> int:
    """Return the bytes of all files of a tenant, and of the results of its batches that have not ended."""
    size = sum(x.size for x in await store.list_records(FILE_PREFIX, tenant) if isinstance(x, FileRecord))
    for ident, state in (await store.batch_states(tenant)).items():
        batch = await store.get(ident) if state in OPEN_STATES else None
        if isinstance(batch, BatchRecord):
            for file in (batch.output_id, batch.error_id):
                size += (await store.measure(file)).size
    return size


def new_id(prefix: str) -> str:
    """Return a new identifier, which cannot be guessed."""
    return f"{prefix}{secrets.token_hex(16)}"


_ENCODER = msgspec.json.Encoder()
_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    FILE_PREFIX: msgspec.json.Decoder(FileRecord),
    BATCH_PREFIX: msgspec.json.Decoder(BatchRecord),
}


def prefix_of(ident: str) -> str | None:
    """Return the prefix of an identifier; ``None``: it has none of a record."""
    return next((prefix for prefix in _DECODERS if ident.startswith(prefix)), None)


def encode_record(record: Record) -> bytes:
    return _ENCODER.encode(record)


def decode_record(prefix: str, data: bytes) -> Record:
    """Return the record of an encoded one."""
    record: Record = _DECODERS[prefix].decode(data)
    return record
