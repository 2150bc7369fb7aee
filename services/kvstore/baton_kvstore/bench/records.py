"""What a run reports: one kind of record per line of ``--json``, all fields documented in docs/bench-store.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from baton.bench.core.records import Record, ResultRecord

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class RunRecord(Record):
    """First line: what was run, and where."""

    record: ClassVar[str] = "run"
    schema: int
    version: str
    machine: dict[str, Any]
    geometries: tuple[str, ...]
    block_size: int
    kv_dtype: str
    tiers: tuple[str, ...]
    ops: tuple[str, ...]
    clients: tuple[int, ...]
    hits: tuple[int, ...]
    total_bytes: int
    disk_readers: int
    warmup: int
    repeat: int
    seconds: float
    seed: int


@dataclass(frozen=True)
class UnavailableRecord(Record):
    """A baseline that cannot work here."""

    record: ClassVar[str] = "unavailable"
    method: str
    reason: str


@dataclass(frozen=True)
class MeasureRecord(Record):
    """One operation on one tier, or a baseline's."""

    record: ClassVar[str] = "measure"
    geometry: str
    block_bytes: int
    blocks: int
    method: str
    op: str
    clients: int
    hit_percent: int
    requests: int
    requests_per_s: float
    blocks_per_s: float
    gb_per_s: float
    p50_ms: float
    p99_ms: float
    came_percent: float
    disk_percent: float | None
    cpu_s_per_gb: float | None


@dataclass(frozen=True)
class VerifyRecord(Record):
    """Bytes that were compared after the turns."""

    record: ClassVar[str] = "verify"
    geometry: str
    method: str
    op: str
    blocks: int
    wrong: int


@dataclass(frozen=True)
class RatioRecord(Record):
    """A tier against a baseline, one client each, and what Baton aims at: ``sense`` is ``>=``."""

    record: ClassVar[str] = "ratio"
    geometry: str
    name: str
    value: float
    sense: str
    aim: float | None
    met: bool | None


RECORDS: tuple[type[Record], ...] = (
    RunRecord,
    UnavailableRecord,
    MeasureRecord,
    VerifyRecord,
    RatioRecord,
    ResultRecord,
)
"""Every kind of record, in the order in which they come."""
