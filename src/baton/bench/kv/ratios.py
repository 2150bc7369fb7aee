"""Baton's pipes against the machine and against others, within one run, and what Baton aims at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.bench.core.records import Record
from baton.bench.core.stats import paired_ratio
from baton.bench.kv.contest import Sample, Standing
from baton.bench.kv.plan import SMALL_BYTES, MethodKey
from baton.bench.kv.records import MessagesRecord, OverlapRecord, RatioRecord


@dataclass(frozen=True, slots=True)
class Aim:
    """A method on a case, divided by another one on another case, should be at least ``least`` (``None``: no aim)."""

    name: str
    top: tuple[str, MethodKey]
    bottom: tuple[str, MethodKey]
    least: float | None


READ_US = 15.0
EXPOSED_SHARE = 0.15


def aims(streams: Sequence[int]) -> list[Aim]:
    """Return what is aimed at, for these numbers of TCP streams.

    What others do has no checksums: TCP is held against it without its own, what they cost is a ratio by itself, and
    against bare sockets it should hold with them too.
    """
    shm, memcpy = MethodKey("shm"), MethodKey("memcpy")
    out = [Aim("shm / memcpy, contiguous", ("contiguous", shm), ("contiguous", memcpy), 0.9)]
    for count in streams:
        tcp, plain, socket = (MethodKey(name, count) for name in ("tcp", "tcp-unchecked", "socket"))
        out += [
            Aim(f"{plain.label} / {socket.label}, contiguous", ("contiguous", plain), ("contiguous", socket), 0.9),
            Aim(f"{tcp.label} / {socket.label}, contiguous", ("contiguous", tcp), ("contiguous", socket), 0.9),
            Aim(f"{tcp.label} / {plain.label}, contiguous", ("contiguous", tcp), ("contiguous", plain), None),
        ]
    unchecked = MethodKey("tcp-unchecked", max(streams))
    if len(streams) > 1:
        for name in ("tcp-unchecked", "tcp"):
            many, one = MethodKey(name, max(streams)), MethodKey(name, min(streams))
            out.append(Aim(f"{many.label} / {one.label}, contiguous", ("contiguous", many), ("contiguous", one), 1.3))
    nixl, nixl_tcp = MethodKey("nixl-bare"), MethodKey("nixl-tcp-bare")
    return [
        *out,
        Aim("shm / bare NIXL, contiguous", ("contiguous", shm), ("contiguous", nixl), 1.0),
        Aim(f"{unchecked.label} / bare NIXL tcp, contiguous", ("contiguous", unchecked), ("contiguous", nixl_tcp), 1.0),
        Aim("shm paged / memcpy contiguous", ("paged", shm), ("contiguous", memcpy), 0.65),
        Aim("shm / bare NIXL, paged", ("paged", shm), ("paged", nixl), 1.5),
        *(
            Aim(f"{tcp.label} paged / contiguous", ("paged", tcp), ("contiguous", tcp), 0.8)
            for tcp in (MethodKey("tcp", count) for count in streams)
        ),
        Aim(f"{unchecked.label} / bare NIXL tcp, paged", ("paged", unchecked), ("paged", nixl_tcp), 1.2),
        Aim("nixl / bare NIXL, contiguous", ("contiguous", MethodKey("nixl")), ("contiguous", nixl), None),
        Aim(
            "gloo / bare gloo, contiguous",
            ("contiguous", MethodKey("gloo")),
            ("contiguous", MethodKey("gloo-bare")),
            None,
        ),
    ]


def compute_ratios(standings: Sequence[Standing], others: Sequence[Record]) -> list[RatioRecord]:
    """Return every ratio whose two sides were measured: medians over runs that took turns.

    Args:
        standings: Of all stages.
        others: Records of small exchanges and of overlap, which have aims of their own.
    """
    found: dict[tuple[str, MethodKey], list[Sample]] = {}
    for standing in standings:
        for case, samples in standing.samples.items():
            found[case.name, standing.contestant.key] = samples
    streams = sorted({key.streams for _, key in found if key.name == "tcp"}) or [1]
    out: list[RatioRecord] = []
    for aim in aims(streams):
        top, bottom = found.get(aim.top), found.get(aim.bottom)
        if top and bottom and len(top) == len(bottom):
            value = paired_ratio([s.bytes / s.seconds for s in top], [s.bytes / s.seconds for s in bottom])
            met = None if aim.least is None else value >= aim.least
            out.append(RatioRecord(aim.name, round(value, 3), "ratio", ">=", aim.least, met))
    for record in others:
        if isinstance(record, MessagesRecord) and (record.pipe, record.bytes) == ("shm", SMALL_BYTES):
            name, value = f"shm 4 KiB {record.what}, p50", record.p50_us
            met = value <= READ_US if record.what == "read" else None
            out.append(RatioRecord(name, value, "us", "<=", None if met is None else READ_US, met))
        elif isinstance(record, OverlapRecord) and record.mode == "layer-wise":
            name = f"{MethodKey(record.pipe, record.streams).label} exposed, layer-wise / serial"
            value = record.percent_of_serial / 100
            out.append(RatioRecord(name, round(value, 3), "ratio", "<=", EXPOSED_SHARE, value <= EXPOSED_SHARE))
    return out
