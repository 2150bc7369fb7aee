"""What is kept of files and batches, and the interface of the stores that keep it.

A *record* describes a file or a batch. The content of a file are its numbered *parts*: of an uploaded file the pieces
that it arrived in, of a batch's output and error file the pieces of its lines, numbered by the lines of the input. So
results are in the order of the input whenever they come, and only the first result of a line counts. Ending a batch
copies nothing: it adds the records of its two files.
"""

from __future__ import annotations

import logging
import secrets
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, TypeAlias

import msgspec

from baton.errors import QueueFullError, shown
from baton_router.frontend.batches.schemas import BatchError, BatchUsage

log = logging.getLogger(__name__)

FILE_PREFIX = "file-"
BATCH_PREFIX = "batch_"
KEEP_S = 30 * 24 * 3600
"""Seconds that files, and batches that have ended, are kept by default."""
PART_BYTES = 256 * 1024
"""Most bytes of a part, and of what is read of a file at once."""
_PARTS_AT_ONCE = 16
"""Parts that are asked for at once, of which :data:`PART_BYTES` bytes are read."""
LINE_PARTS = 1 << 16
"""Numbers of parts that the result of a line has for itself."""
_MOST_LOGGED = 1000
UPLOADING = "uploading"
"""Status of a file whose content is still arriving; clients do not see it."""
OPEN_STATES = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
"""States of a batch that has not ended."""
_STATES = "validating|failed|in_progress|finalizing|completed|expired|cancelling|cancelled"
State: TypeAlias = Annotated[str, msgspec.Meta(pattern=f"^({_STATES})$")]
TimeName: TypeAlias = Annotated[str, msgspec.Meta(pattern=f"^({_STATES})_at$")]


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
        usage: Tokens of the answers, once the batch has ended; ``None``: not yet, or of an earlier version.
    """

    prefix: ClassVar[str] = BATCH_PREFIX

    id: str
    tenant: str
    status: State
    endpoint: str
    input_file_id: str
    output_id: str
    error_id: str
    created_at: int
    expires_at: int
    removed_at: int
    output_s: int = KEEP_S
    metadata: dict[str, str] | None = None
    times: dict[TimeName, int] = msgspec.field(default_factory=dict)
    total: int = 0
    errors: list[BatchError] = msgspec.field(default_factory=list)
    completed: int = 0
    failed: int = 0
    usage: BatchUsage | None = None


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

    def parts(self) -> list[tuple[int, bytes]]:
        """Return its parts with their numbers."""
        starts = range(0, len(self.data), PART_BYTES)
        first = self.number * LINE_PARTS
        return [(number, self.data[at : at + PART_BYTES]) for number, at in enumerate(starts, first)]


class FileSize(NamedTuple):
    """Size of a file's content.

    Attributes:
        lines: Lines of an output or error file.
        size: Bytes.
    """

    lines: int
    size: int


class Usage(NamedTuple):
    """What a tenant keeps, or may keep.

    Attributes:
        files: Files.
        size: Bytes of all files, and of the results of batches that have not ended.
        batches: Batches that have not ended.
    """

    files: int
    size: int
    batches: int

    def before(self, record: Record, *, is_new: bool) -> Usage:
        """Return what a tenant may keep so that a record finds room below these bounds."""
        is_batch = isinstance(record, BatchRecord)
        size = record.size if isinstance(record, FileRecord) else 0
        return Usage(self.files - is_new, self.size - size, self.batches - (is_new and is_batch))

    def exceeds(self, bounds: Usage) -> bool:
        """Return whether it is more than may be kept."""
        return any(own > most for own, most in zip(self, bounds, strict=True))

    def error(self, record: Record, bounds: Usage) -> QueueFullError:
        """Return the error for a record that finds no room below these bounds."""
        size = self.size + (record.size if isinstance(record, FileRecord) else 0)
        if size > bounds.size:
            message = f"files and results have {size} bytes with this, of at most {bounds.size}: delete some"
            return QueueFullError(message, field="file")
        if isinstance(record, BatchRecord) and self.batches >= bounds.batches:
            message = f"{self.batches} batches have not ended yet, as many as there may be at once"
            return QueueFullError(message, retry_after_s=60.0)
        return QueueFullError(f"there are {self.files} files already, as many as may be kept: delete some")


class BatchStore(Protocol):
    """Keeps files and batches. Several routers may use one.

    All methods raise ``UnavailableError`` if what is below cannot be reached or has no room. A record that cannot be
    read is logged, and left out as if it were not there.
    """

    async def write_record(self, record: Record, *, expected: str | None = None, bounds: Usage | None = None) -> bool:
        """Write a record.

        Args:
            record: The record.
            expected: Status that the stored record must have; ``None``: there must be no such record yet.
            bounds: Most that the tenant may keep; ``None``: anything. The check and the write are a single step.

        Returns:
            Whether it was written.

        Raises:
            QueueFullError: The tenant would keep more.
        """

    async def usage(self, tenant: str) -> Usage:
        """Return what a tenant keeps."""

    async def get(self, ident: str) -> Record | None:
        """Return a record by its identifier; ``None``: there is none."""

    async def list_records(self, prefix: str, tenant: str) -> list[Record]:
        """Return a tenant's files or batches, by the prefix of their identifiers, in the order of their creation."""

    async def batch_states(self, tenant: str) -> dict[str, str]:
        """Return the states of a tenant's batches by their identifiers, in the order of their creation."""

    async def open_batches(self) -> list[BatchRecord]:
        """Return all tenants' batches that have not ended, in the order of their creation."""

    async def due_records(self, now: float) -> list[Record]:
        """Return the records that are to be removed by now, some of them if there are many; unreadable ones go."""

    async def delete(self, record: Record) -> None:
        """Remove a record, the parts of a file, and the results of a batch that has not ended."""

    async def write_part(self, file_id: str, number: int, data: bytes) -> None:
        """Write a part of an uploaded file, of at most :data:`PART_BYTES` bytes."""

    async def add_results(self, batch: BatchRecord, results: Sequence[LineResult]) -> None:
        """Write results of lines, all or none of them; a line that has a result keeps it.

        Nothing is written if the record of the batch is gone.
        """

    async def part_numbers(self, file_id: str) -> list[int]:
        """Return the numbers of a file's parts, rising; a line's begin at a multiple of :data:`LINE_PARTS`."""

    async def read_parts(self, file_id: str, numbers: Sequence[int]) -> list[bytes]:
        """Return the first of some parts that have :data:`PART_BYTES` bytes together at most.

        Args:
            file_id: The file.
            numbers: Numbers of the parts, neighbours in :meth:`part_numbers`.
        """

    async def measure(self, file_id: str) -> FileSize:
        """Return the size of a file's content."""

    async def claim(self, batch_id: str, owner: str, seconds: float) -> bool:
        """Lease a batch to a router, or renew its lease; ``False``: another router has it."""

    async def release(self, batch_id: str, owner: str) -> None:
        """End a router's lease, if it has it."""

    async def close(self) -> None:
        """Close connections and files; may be called any number of times."""


async def read_content(store: BatchStore, file_id: str) -> AsyncIterator[bytes]:
    """Iterate over the content of a file, of which at most :data:`PART_BYTES` bytes are in memory."""
    numbers = array("Q", await store.part_numbers(file_id))
    at = 0
    while at < len(numbers):
        parts = await store.read_parts(file_id, numbers[at : at + _PARTS_AT_ONCE])
        if not parts:
            return  # the file was deleted meanwhile
        at += len(parts)
        content = b"".join(parts)
        del parts
        if content:
            yield content


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


def removed_with(record: Record) -> list[str]:
    """Return the identifiers that go with a record: files of a batch that has not ended belong to it alone."""
    if isinstance(record, BatchRecord) and record.status in OPEN_STATES:
        return [record.id, record.output_id, record.error_id]
    return [record.id]


def encode_record(record: Record) -> bytes:
    return _ENCODER.encode(record)


class RecordReader:
    """Reads stored records; those that cannot be read are logged, each once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def read(self, ident: str, data: bytes) -> Record | None:
        """Return a record.

        Args:
            ident: Identifier that it is stored by.
            data: The encoded record.

        Returns:
            The record; ``None``: it cannot be read.
        """
        prefix = prefix_of(ident)
        if prefix is None:
            return None
        try:
            record: Record = _DECODERS[prefix].decode(data)
            if record.id != ident:
                raise ValueError(f"it has the identifier {shown(record.id)}")
        except (msgspec.DecodeError, TypeError, ValueError, RecursionError) as error:
            if ident not in self._logged and len(self._logged) < _MOST_LOGGED:
                self._logged.add(ident)
                log.error("the record of %s cannot be read and is left out: %s", ident, error)
            return None
        return record
