"""What a run reports: one kind of record per line of ``--json``, all fields documented in docs/bench-store.md."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class StoreRecord:
    """A line: its fields, and ``record``, its kind."""

    record: ClassVar[str]

    def to_json(self) -> str:
        """Write as one line of JSON."""
        return json.dumps({"record": self.record, **dataclasses.asdict(self)}, allow_nan=False)


@dataclass(frozen=True)
class RunRecord(StoreRecord):
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
class UnavailableRecord(StoreRecord):
    """A baseline that cannot work here."""

    record: ClassVar[str] = "unavailable"
    method: str
    reason: str


@dataclass(frozen=True)
class MeasureRecord(StoreRecord):
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
class VerifyRecord(StoreRecord):
    """Bytes that were compared after the turns."""

    record: ClassVar[str] = "verify"
    geometry: str
    method: str
    op: str
    blocks: int
    wrong: int


@dataclass(frozen=True)
class RatioRecord(StoreRecord):
    """A tier against a baseline, one client each, and what Baton aims at: ``sense`` is ``>=``."""

    record: ClassVar[str] = "ratio"
    geometry: str
    name: str
    value: float
    sense: str
    aim: float | None
    met: bool | None


@dataclass(frozen=True)
class ResultRecord(StoreRecord):
    """Last line: the exit status and what led to it."""

    record: ClassVar[str] = "result"
    exit_code: int
    failures: tuple[str, ...]
    seconds: float


RECORDS: tuple[type[StoreRecord], ...] = (
    RunRecord,
    UnavailableRecord,
    MeasureRecord,
    VerifyRecord,
    RatioRecord,
    ResultRecord,
)
"""Every kind of record, in the order in which they come."""
