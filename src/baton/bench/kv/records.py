"""What a run reports: one kind of record per line of ``--json``, all fields documented in docs/bench-kv.md."""

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
    peer: dict[str, Any] | None
    pipes: tuple[str, ...]
    geometry: str
    kv_bytes_per_token: int
    block_size: int
    dst_block_size: int
    kv_dtype: str
    dst_kv_dtype: str
    src_tp: int
    src_pp: int
    dst_tp: int
    dst_pp: int
    pattern: str
    warmup: int
    repeat: int
    seed: int


@dataclass(frozen=True)
class UnavailableRecord(Record):
    """A pipe or baseline that cannot work here."""

    record: ClassVar[str] = "unavailable"
    method: str
    reason: str
    asked: bool


@dataclass(frozen=True)
class TransferRecord(Record):
    """A pipe at one size."""

    record: ClassVar[str] = "transfer"
    case: str
    pipe: str
    streams: int
    pattern: str
    tokens: int
    blocks: int
    block_bytes: int
    bytes: int
    runs: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    gb_per_s: float
    limit: str
    limit_gb_per_s: float
    percent_of_limit: float
    cpu_s_per_gb: float
    verified: bool
    wrong_blocks: int


@dataclass(frozen=True)
class BaselineRecord(Record):
    """What the machine does without Baton, at the same size in the same run."""

    record: ClassVar[str] = "baseline"
    case: str
    method: str
    streams: int
    tokens: int
    bytes: int
    runs: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    gb_per_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True)
class MessagesRecord(Record):
    """Small exchanges, one after the other: ``round trip`` over a message pipe, one-sided ``read``, or ``fetch``."""

    record: ClassVar[str] = "messages"
    pipe: str
    what: str
    bytes: int
    count: int
    p50_us: float
    p95_us: float
    p99_us: float
    per_s: float


@dataclass(frozen=True)
class OverlapRecord(Record):
    """Transfer under simulated compute: ``serial``, ``chunked`` or ``layer-wise``."""

    record: ClassVar[str] = "overlap"
    pipe: str
    streams: int
    mode: str
    tokens: int
    chunk: int
    steps: int
    prefill_tokens_per_s: float
    compute_ms: float
    exposed_ms: float
    percent_of_serial: float
    verified: bool


@dataclass(frozen=True)
class VerdictRecord(Record):
    """Does this link carry this model: KV bytes per token times prefill tokens/s against bytes per second."""

    record: ClassVar[str] = "verdict"
    pipe: str
    streams: int
    tokens: int
    kv_bytes_per_token: int
    gb_per_s: float
    max_prefill_tokens_per_s: float
    prefill_tokens_per_s: float | None
    carries: bool | None


@dataclass(frozen=True)
class RatioRecord(Record):
    """Two methods of one run against each other, and what Baton aims at: ``sense`` is ``>=`` or ``<=``."""

    record: ClassVar[str] = "ratio"
    name: str
    value: float
    unit: str
    sense: str
    aim: float | None
    met: bool | None


RECORDS: tuple[type[Record], ...] = (
    RunRecord,
    UnavailableRecord,
    BaselineRecord,
    TransferRecord,
    MessagesRecord,
    OverlapRecord,
    VerdictRecord,
    RatioRecord,
    ResultRecord,
)
"""Every kind of record, in the order in which they come."""
