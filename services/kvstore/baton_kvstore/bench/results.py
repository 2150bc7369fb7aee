"""Tiers against baselines, one client each, and what Baton aims at."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.bench.core.stats import Spread, paired_ratio
from baton_kvstore.bench.plan import Plan
from baton_kvstore.bench.records import MeasureRecord, RatioRecord

NAMES = {"shm": "memory over shm", "tcp": "memory over tcp", "disk": "disk", "redis": "Redis", "plain": "plain reads"}
NAMES |= {"redis-mget": "Redis MGET", "redis-bare": "Redis, bare socket"}
_AIMS: tuple[tuple[str, str, float | None], ...] = (
    ("shm", "memcpy", 0.6),
    ("tcp", "memcpy", None),
    ("disk", "plain", 0.8),
    ("disk", "dd", 0.8),
    ("shm", "redis", 3.0),
    ("tcp", "redis", 3.0),
    ("disk", "redis", 3.0),
    ("shm", "redis-mget", 3.0),
    ("tcp", "redis-mget", 3.0),
    ("disk", "redis-mget", 3.0),
    ("shm", "redis-bare", None),
    ("tcp", "redis-bare", None),
    ("disk", "redis-bare", None),
)


def find_ratios(geometry: str, cells: Sequence[Cell]) -> list[RatioRecord]:
    """Return the ratios of what was measured: medians of the quotients within a round."""
    found = {cell.method: cell for cell in cells if (cell.op, cell.clients, cell.hit_percent) == ("get", 1, 100)}
    out = []
    for tier, other, aim in _AIMS:
        if tier in found and other in found:
            value = round(paired_ratio(found[tier].rates, found[other].rates), 3)
            name = f"get, {NAMES[tier]} / {NAMES.get(other, other)}"
            out.append(RatioRecord(geometry, name, value, ">=", aim, None if aim is None else value >= aim))
    return out


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of all clients.

    Attributes:
        seconds: From the first request's start to the last one's end.
        blocks: That came, went or were found.
        wanted: That should have.
        latencies: Seconds of each request.
        cpu: Seconds of clients and servers together.
        disk_bytes: Read by the store whose disk is read.
    """

    seconds: float
    blocks: int
    wanted: int
    latencies: list[float]
    cpu: float
    disk_bytes: int = 0


@dataclass
class Cell:
    """A method with an operation, a number of clients and a share of hits."""

    method: str
    op: str
    clients: int
    hit_percent: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def label(self) -> str:
        """For people."""
        mix = f", {self.hit_percent} % hits" if self.hit_percent != 100 else ""
        return f"{self.op} {self.method} x{self.clients}{mix}"

    @property
    def rates(self) -> list[float]:
        """Blocks per second, turn by turn."""
        return [sample.blocks / sample.seconds for sample in self.samples]


def measure_record(plan: Plan, cell: Cell) -> MeasureRecord:
    """Sum up a cell: medians over its turns, percentiles over all requests."""
    spread = Spread.of([1e3 * value for sample in cell.samples for value in sample.latencies])
    rate = statistics.median(cell.rates)
    moved = sum(sample.blocks for sample in cell.samples) * plan.block_bytes
    moves = cell.op != "contains"
    return MeasureRecord(
        geometry=plan.name,
        block_bytes=plan.block_bytes,
        blocks=plan.blocks,
        method=cell.method,
        op=cell.op,
        clients=cell.clients,
        hit_percent=cell.hit_percent,
        requests=sum(len(sample.latencies) for sample in cell.samples),
        requests_per_s=round(statistics.median(len(s.latencies) / s.seconds for s in cell.samples), 2),
        blocks_per_s=round(rate, 1),
        gb_per_s=round(rate * plan.block_bytes / 1e9, 4) if moves else 0.0,
        p50_ms=round(spread.p50, 4),
        p99_ms=round(spread.p99, 4),
        came_percent=round(_came(cell), 2),
        disk_percent=_from_disk(cell, moved),
        cpu_s_per_gb=round(sum(s.cpu for s in cell.samples) / (moved / 1e9), 4) if moves and moved else None,
    )


def _from_disk(cell: Cell, moved: int) -> float | None:
    """Return the share of what came that was read from disk during the turns, in percent."""
    if (cell.method, cell.op) != ("disk", "get") or not moved:
        return None
    return round(min(100.0, 100.0 * sum(sample.disk_bytes for sample in cell.samples) / moved), 2)


def _came(cell: Cell) -> float:
    """Return the share of the blocks that should have come, in percent."""
    wanted = sum(sample.wanted for sample in cell.samples)
    return min(100.0, 100.0 * sum(sample.blocks for sample in cell.samples) / wanted) if wanted else 100.0
