"""Turns samples into records: rates, shares of the medium's limit, and the verdict."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.bench.core.report import Record, Spread, paired_ratio
from baton.bench.kv.contest import Sample, Standing
from baton.bench.kv.plan import DEVICE_PIPES, HOST_ENDS, SMALL_BYTES, Case, Ends, MethodKey, Options, Stage
from baton.bench.kv.records import (
    BaselineRecord,
    MessagesRecord,
    OverlapRecord,
    RatioRecord,
    TransferRecord,
    VerdictRecord,
)

LIMITS = {"shm": "memcpy", "nixl": "memcpy", "tcp": "socket", "gloo": "socket"}
"""The baseline that bounds a pipe of a kind on one host.

Between two hosts it is the socket for all; where an end is in device memory, the bare copy."""


def median_rate(samples: Sequence[Sample]) -> float:
    """Return the median GB/s of the runs."""
    return statistics.median(sample.bytes / sample.seconds / 1e9 for sample in samples)


def stage_records(stage: Stage, standings: Sequence[Standing], options: Options) -> list[Record]:
    """Return the records of a stage, case by case, baselines first."""
    out: list[Record] = []
    for case in stage.cases:
        done = {s.contestant.key: s.samples[case] for s in standings if s.samples.get(case)}
        pipes = {s.contestant.key for s in standings if s.contestant.is_pipe}
        out += [_baseline(case, key, samples, stage.ends.label) for key, samples in done.items() if key not in pipes]
        for key, samples in done.items():
            if key in pipes:
                bound = "memcpy" if stage.ends.on_device else LIMITS[key.name]
                limit = limit_of("socket" if options.connect else bound, key.streams, done)
                out.append(_transfer(case, key, samples, limit, options.pattern, stage.ends.label))
    return out


def limit_of(name: str, streams: int, done: Mapping[MethodKey, list[Sample]]) -> tuple[str, float]:
    """Return the label and the median GB/s of a baseline, with as many streams if it was measured so; else none."""
    measured = [key for key in done if key.name == name]
    if not measured:
        return "", 0.0
    nearest = min(measured, key=lambda key: abs(key.streams - streams))
    return nearest.label, median_rate(done[nearest])


def verdict_records(stage: Stage, standings: Sequence[Standing], options: Options) -> list[VerdictRecord]:
    """Return, per pipe and prompt length, which prefill speed the link carries: kappa * v_p <= B.

    B counts the prompts' own KV: what ranks that hold the same heads get beyond that is the price of their shape.
    """
    if stage.name != "kv":
        return []
    flows, out = options.num_sources * options.num_targets, []
    for case in stage.cases:
        for standing in standings:
            if standing.contestant.is_pipe and standing.samples.get(case):
                rate = case.flow_bytes * flows / sample_seconds(standing.samples[case]) / 1e9
                key, kappa = standing.contestant.key, stage.source.bytes_per_token
                one = verdict(key, case.tokens, kappa, rate, options.prefill_tokens_per_s)
                out.append(dataclasses.replace(one, memory=stage.ends.label))
    return out


def verdict(key: MethodKey, tokens: int, kappa: int, gb_per_s: float, wanted: float | None) -> VerdictRecord:
    """Compare a link's rate (GB/s) with what a prefill speed (tokens/s) makes at ``kappa`` bytes per token."""
    most = gb_per_s * 1e9 / kappa
    return VerdictRecord(
        pipe=key.name,
        streams=key.streams,
        tokens=tokens,
        kv_bytes_per_token=kappa,
        gb_per_s=round(gb_per_s, 3),
        max_prefill_tokens_per_s=round(most, 1),
        prefill_tokens_per_s=wanted,
        carries=None if wanted is None else wanted <= most,
    )


def sample_seconds(samples: Sequence[Sample]) -> float:
    """Return the median seconds of a run."""
    return statistics.median(sample.seconds for sample in samples)


def _timing(samples: Sequence[Sample]) -> dict[str, float]:
    spread = Spread.of([sample.seconds * 1e3 for sample in samples])
    return {f"{name}_ms": round(value, 4) for name, value in dataclasses.asdict(spread).items()}


def _cpu_per_gb(samples: Sequence[Sample]) -> float:
    return round(sum(sample.cpu for sample in samples) / (sum(sample.bytes for sample in samples) / 1e9), 4)


def _baseline(case: Case, key: MethodKey, samples: Sequence[Sample], memory: str) -> BaselineRecord:
    return BaselineRecord(
        case=case.name,
        method=key.name,
        streams=key.streams,
        tokens=case.tokens,
        bytes=samples[0].bytes,
        runs=len(samples),
        gb_per_s=round(median_rate(samples), 3),
        cpu_s_per_gb=_cpu_per_gb(samples),
        memory=memory,
        **_timing(samples),
    )


def _transfer(
    case: Case, key: MethodKey, samples: Sequence[Sample], limit: tuple[str, float], pattern: str, memory: str
) -> TransferRecord:
    rate, wrong = median_rate(samples), [sample.wrong for sample in samples if sample.wrong is not None]
    return TransferRecord(
        case=case.name,
        pipe=key.name,
        streams=key.streams,
        pattern=pattern,
        tokens=case.tokens,
        blocks=case.blocks,
        block_bytes=case.flow_bytes // case.blocks,
        bytes=samples[0].bytes,
        runs=len(samples),
        gb_per_s=round(rate, 3),
        limit=limit[0],
        limit_gb_per_s=round(limit[1], 3),
        percent_of_limit=round(100 * rate / limit[1], 1) if limit[1] else 0.0,
        cpu_s_per_gb=_cpu_per_gb(samples),
        verified=bool(wrong) and not any(wrong),
        wrong_blocks=sum(wrong),
        memory=memory,
        **_timing(samples),
    )


@dataclass(frozen=True, slots=True)
class Aim:
    """A method on a case, divided by another one on another case, should be at least ``least`` (``None``: no aim)."""

    name: str
    top: tuple[str, MethodKey]
    bottom: tuple[str, MethodKey]
    least: float | None


READ_US = 15.0
EXPOSED_SHARE = 0.15
_TITLES = {"nixl-bare": "bare NIXL", "nixl-tcp-bare": "bare NIXL tcp", "gloo-bare": "bare gloo"}


def aims(streams: Sequence[int]) -> list[Aim]:
    """Return what is aimed at, for these numbers of TCP streams.

    What others do has no checksums: TCP is held against it without its own, what they cost is a ratio by itself, and
    against bare sockets it should hold with them too.
    """

    def aim(top: MethodKey, bottom: MethodKey, least: float | None, case: str = "contiguous") -> Aim:
        name = f"{top.label} / {_TITLES.get(bottom.name, bottom.label)}, {case}"
        return Aim(name, (case, top), (case, bottom), least)

    shm, memcpy, nixl, nixl_tcp = map(MethodKey, ("shm", "memcpy", "nixl-bare", "nixl-tcp-bare"))
    most, fewest = max(streams), min(streams)
    unchecked = MethodKey("tcp-unchecked", most)
    out = [aim(shm, memcpy, 0.9)]
    for count in streams:
        tcp, plain, socket = (MethodKey(name, count) for name in ("tcp", "tcp-unchecked", "socket"))
        out += [aim(plain, socket, 0.9), aim(tcp, socket, 0.9), aim(tcp, plain, None)]
    if most > fewest:
        out += [aim(MethodKey(name, most), MethodKey(name, fewest), 1.3) for name in ("tcp-unchecked", "tcp")]
    out += [
        aim(shm, nixl, 1.0),
        aim(unchecked, nixl_tcp, 1.0),
        Aim("shm paged / memcpy contiguous", ("paged", shm), ("contiguous", memcpy), 0.65),
        aim(shm, nixl, 1.5, "paged"),
    ]
    for count in streams:
        tcp = MethodKey("tcp", count)
        out.append(Aim(f"{tcp.label} paged / contiguous", ("paged", tcp), ("contiguous", tcp), 0.8))
    return [
        *out,
        aim(unchecked, nixl_tcp, 1.2, "paged"),
        aim(MethodKey("nixl"), nixl, None),
        aim(MethodKey("gloo"), MethodKey("gloo-bare"), None),
    ]


def device_aims(keys: Iterable[tuple[str, MethodKey]], ends: Ends) -> list[Aim]:
    """Return what is held against what where an end is in device memory: every pipe against the bare copy, and NIXL.

    Args:
        keys: Cases and methods that were measured.
        ends: Where blocks lie.
    """
    out = []
    for case, key in keys:
        for bottom in (MethodKey("memcpy"), MethodKey("nixl-bare")):
            if key.name in DEVICE_PIPES:
                title = f"{key.label} / {_TITLES.get(bottom.name, bottom.label)}, {case}, {ends.label}"
                out.append(Aim(title, (case, key), (case, bottom), None))
    return out


def compute_ratios(
    standings: Sequence[Standing], others: Sequence[Record], ends: Ends = HOST_ENDS
) -> list[RatioRecord]:
    """Return every ratio whose two sides were measured: medians over runs that took turns.

    Args:
        standings: Of all stages of these ends.
        others: Their records of small exchanges and of overlap, which have aims of their own in host memory.
        ends: Where blocks lie.
    """
    found: dict[tuple[str, MethodKey], list[Sample]] = {}
    for standing in standings:
        for case, samples in standing.samples.items():
            found[case.name, standing.contestant.key] = samples
    streams = sorted({key.streams for _, key in found if key.name == "tcp"}) or [1]
    out: list[RatioRecord] = []
    for aim in device_aims(found, ends) if ends.on_device else aims(streams):
        top, bottom = found.get(aim.top), found.get(aim.bottom)
        if top and bottom and len(top) == len(bottom):
            value = paired_ratio([s.bytes / s.seconds for s in top], [s.bytes / s.seconds for s in bottom])
            met = None if aim.least is None else value >= aim.least
            out.append(RatioRecord(aim.name, round(value, 3), "ratio", ">=", aim.least, met))
    for record in () if ends.on_device else others:
        if isinstance(record, MessagesRecord) and (record.pipe, record.bytes) == ("shm", SMALL_BYTES):
            name, value = f"shm 4 KiB {record.what}, p50", record.p50_us
            met = value <= READ_US if record.what == "read" else None
            out.append(RatioRecord(name, value, "us", "<=", None if met is None else READ_US, met))
        elif isinstance(record, OverlapRecord) and record.mode == "layer-wise":
            name = f"{MethodKey(record.pipe, record.streams).label} exposed, layer-wise / serial"
            value = record.percent_of_serial / 100
            out.append(RatioRecord(name, round(value, 3), "ratio", "<=", EXPOSED_SHARE, value <= EXPOSED_SHARE))
    return out
