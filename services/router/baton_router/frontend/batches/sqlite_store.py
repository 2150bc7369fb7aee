"""Files and batches in a folder, by SQLite: for one router, or several on one host."""

from __future__ import annotations

import asyncio
import functools
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from baton.config.secrets import require_own_folder
from baton.errors import ConfigError, UnavailableError
from baton_router.frontend.batches.store import (
    BATCH_PREFIX,
    FILE_PREFIX,
    LINE_PARTS,
    OPEN_STATES,
    PART_BYTES,
    BatchRecord,
    FileSize,
    LineResult,
    Record,
    RecordReader,
    Usage,
    encode_record,
    removed_with,
)

T = TypeVar("T")
FIELD = "batch_store"
_BUSY_S = 10.0
_DUE = 100
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, prefix TEXT NOT NULL, tenant TEXT NOT NULL,
    status TEXT NOT NULL, removed_at INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS records_of_tenant ON records (prefix, tenant, number);
CREATE INDEX IF NOT EXISTS records_by_status ON records (prefix, status);
CREATE INDEX IF NOT EXISTS records_due ON records (removed_at);
CREATE TABLE IF NOT EXISTS parts (
    file TEXT NOT NULL, number INTEGER NOT NULL, size INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS parts_of_file ON parts (file, number, size);
CREATE TABLE IF NOT EXISTS leases (batch TEXT PRIMARY KEY, owner TEXT NOT NULL, until REAL NOT NULL);
"""
_ADD_RESULT = """
INSERT INTO parts SELECT ?1, ?3, ?4, ?5 WHERE NOT EXISTS (SELECT 1 FROM parts WHERE file IN (?1, ?2) AND number = ?3)
"""
_OPEN = ", ".join(f"'{state}'" for state in sorted(OPEN_STATES))
_KEPT = f"""
SELECT id, body FROM records
WHERE prefix IN ('{FILE_PREFIX}', '{BATCH_PREFIX}') AND tenant = ? AND (prefix = '{FILE_PREFIX}' OR status IN ({_OPEN}))
"""
_CLAIM = """
INSERT INTO leases VALUES (?1, ?2, ?3)
ON CONFLICT (batch) DO UPDATE SET owner = ?2, until = ?3 WHERE owner = ?2 OR until <= ?4
"""


class SqliteBatchStore:
    """A :class:`~baton_router.frontend.batches.store.BatchStore` in a folder. One thread makes all calls.

    Args:
        folder: The folder; it is made if it is missing.
        now: Clock of the leases, in Unix seconds.

    Raises:
        ConfigError: Another user can change the folder, or it cannot be written to.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._closed = False
        self._reader = RecordReader()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch store")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            require_own_folder(folder.resolve(), folder, FIELD)
            path = folder / "batches.sqlite3"
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
            path.chmod(0o600)  # SQLite gives its other files the mode of this one
            self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            # The end of a process loses nothing; after a loss of power the last results may be computed again.
            for pragma in ("journal_mode = WAL", "synchronous = NORMAL"):
                self._db.execute(f"PRAGMA {pragma}").fetchall()
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"batches cannot be kept in {folder}: {error}", field=FIELD) from error

    async def write_record(self, record: Record, *, expected: str | None = None, bounds: Usage | None = None) -> bool:
        values: tuple[object, ...] = (
            record.id,
            record.prefix,
            record.tenant,
            record.status,
            record.removed_at,
            encode_record(record),
        )
        statement = "UPDATE records SET status = ?, removed_at = ?, body = ? WHERE id = ? AND status = ?"
        if expected is None:
            columns = "id, prefix, tenant, status, removed_at, body"
            statement = f"INSERT OR IGNORE INTO records ({columns}) VALUES (?, ?, ?, ?, ?, ?)"
        else:
            values = (*values[3:], record.id, expected)
        if bounds is None:
            return await self._change(statement, values)
        most = bounds.before(record, is_new=expected is None)

        def work() -> bool:
            with self._transaction():
                usage = self._usage(record.tenant)
                if usage.exceeds(most):
                    raise usage.error(record, bounds)
                return self._db.execute(statement, values).rowcount > 0

        return await self._run(work)

    async def usage(self, tenant: str) -> Usage:
        return await self._run(functools.partial(self._usage, tenant))

    def _usage(self, tenant: str) -> Usage:
        rows = self._db.execute(_KEPT, (tenant,)).fetchall()
        records = [record for row in rows if (record := self._reader.read(*row)) is not None]
        batches = [x for x in records if isinstance(x, BatchRecord)]
        size = sum(x.size for x in records if not isinstance(x, BatchRecord))
        for batch in batches:
            size += sum(self._measure(ident).size for ident in (batch.output_id, batch.error_id))
        return Usage(len(records) - len(batches), size, len(batches))

    async def get(self, ident: str) -> Record | None:
        rows = await self._records("WHERE id = ?", (ident,))
        return rows[0] if rows else None

    async def list_records(self, prefix: str, tenant: str) -> list[Record]:
        return await self._records("WHERE prefix = ? AND tenant = ? ORDER BY number", (prefix, tenant))

    async def batch_states(self, tenant: str) -> dict[str, str]:
        statement = "SELECT id, status FROM records WHERE prefix = ? AND tenant = ? ORDER BY number"
        return await self._run(lambda: dict(self._db.execute(statement, (BATCH_PREFIX, tenant)).fetchall()))

    async def open_batches(self) -> list[BatchRecord]:
        records = await self._records(f"WHERE prefix = ? AND status IN ({_OPEN}) ORDER BY number", (BATCH_PREFIX,))
        return [record for record in records if isinstance(record, BatchRecord)]

    async def due_records(self, now: float) -> list[Record]:
        def work() -> list[Record]:
            due: list[Record] = []
            statement = f"SELECT id, body FROM records WHERE removed_at <= ? LIMIT {_DUE}"
            for ident, body in self._db.execute(statement, (now,)).fetchall():
                if (record := self._reader.read(ident, body)) is not None:
                    due.append(record)
                else:
                    self._delete([ident])
            return due

        return await self._run(work)

    async def delete(self, record: Record) -> None:
        await self._run(lambda: self._delete(removed_with(record)))

    def _delete(self, idents: Sequence[str]) -> None:
        with self._transaction():
            for ident in idents:
                self._db.execute("DELETE FROM records WHERE id = ?", (ident,))
                self._db.execute("DELETE FROM parts WHERE file = ?", (ident,))

    async def write_part(self, file_id: str, number: int, data: bytes) -> None:
        await self._change("INSERT INTO parts VALUES (?, ?, ?, ?)", (file_id, number, len(data), data))

    async def add_results(self, batch: BatchRecord, results: Sequence[LineResult]) -> None:
        files = (batch.output_id, batch.error_id)

        def work() -> None:
            with self._transaction():
                if self._db.execute("SELECT 1 FROM records WHERE id = ?", (batch.id,)).fetchone() is None:
                    return
                for result in results:
                    own, other = files[result.failed], files[not result.failed]
                    (number, data), *rest = result.parts()
                    if self._db.execute(_ADD_RESULT, (own, other, number, len(data), data)).rowcount:
                        rows = [(own, number, len(data), data) for number, data in rest]
                        self._db.executemany("INSERT INTO parts VALUES (?, ?, ?, ?)", rows)

        await self._run(work)

    async def part_numbers(self, file_id: str) -> list[int]:
        statement = "SELECT number FROM parts WHERE file = ? ORDER BY number"
        return await self._run(lambda: [row[0] for row in self._db.execute(statement, (file_id,))])

    async def read_parts(self, file_id: str, numbers: Sequence[int]) -> list[bytes]:
        statement = "SELECT data FROM parts WHERE file = ? AND number BETWEEN ? AND ? ORDER BY number"
        values = (file_id, numbers[0], numbers[-1])

        def work() -> list[bytes]:
            parts: list[bytes] = []
            room = PART_BYTES
            for (data,) in self._db.execute(statement, values):
                room -= len(data)
                if room < 0 and parts:
                    break
                parts.append(data)
            return parts

        return await self._run(work)

    async def measure(self, file_id: str) -> FileSize:
        return await self._run(functools.partial(self._measure, file_id))

    def _measure(self, file_id: str) -> FileSize:
        columns = f"coalesce(sum(number % {LINE_PARTS} = 0), 0), coalesce(sum(size), 0)"
        return FileSize(*self._db.execute(f"SELECT {columns} FROM parts WHERE file = ?", (file_id,)).fetchone())

    async def claim(self, batch_id: str, owner: str, seconds: float) -> bool:
        now = self._now()
        return await self._change(_CLAIM, (batch_id, owner, now + seconds, now))

    async def release(self, batch_id: str, owner: str) -> None:
        await self._change("DELETE FROM leases WHERE batch = ? AND owner = ?", (batch_id, owner))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()

    async def _records(self, where: str, values: Sequence[object]) -> list[Record]:
        statement = f"SELECT id, body FROM records {where}"
        rows = await self._run(lambda: self._db.execute(statement, values).fetchall())
        return [record for row in rows if (record := self._reader.read(*row)) is not None]

    async def _change(self, statement: str, values: Sequence[object]) -> bool:
        """Run a statement; return whether it changed something."""
        return await self._run(lambda: self._db.execute(statement, values).rowcount > 0)

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, functools.partial(work))
        except sqlite3.Error as error:
            raise UnavailableError("the store of batches fails", retry_after_s=1.0) from error


class _Transaction:
    """A transaction that writes: all of it, or nothing if an error ends it."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        self._db.execute("ROLLBACK" if kind is not None else "COMMIT")
