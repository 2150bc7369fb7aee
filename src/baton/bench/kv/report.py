"""Turns samples into records: rates, shares of the medium's limit, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.bench.core.records import Record
from baton.bench.core.stats import Spread, paired_ratio
from baton.bench.kv.contest import FlowContestant, Sample, Standing, Study
from baton.bench.kv.control import seconds
from baton.bench.kv.plan import SMALL_BYTES, Case, MethodKey, Options, Stage
from baton.bench.kv.records import (
    BaselineRecord,
    MessagesRecord,
    OverlapRecord,
    RatioRecord,
    TransferRecord,
    VerdictRecord,
)
from baton.bench.kv.specs import MAX_COMPUTE_S, MODES
from baton.errors import ConfigError

LIMITS = {"shm": "memcpy", "nixl": "memcpy", "tcp": "socket", "gloo": "socket"}
"""The baseline that bounds a pipe of a kind on one host; between two, it is the socket for all."""


def rates(samples: Sequence[Sample]) -> list[float]:
    """Return GB/s of each run."""
    return [sample.bytes / sample.seconds / 1e9 for sample in samples]


def stage_records(stage: Stage, standings: Sequence[Standing], options: Options) -> list[Record]:
    """Return the records of a stage, case by case, baselines first."""
    out: list[Record] = []
    for case in stage.cases:
        done = {s.contestant.key: (s, s.samples[case]) for s in standings if s.samples.get(case)}
        for standing, samples in done.values():
            if not standing.contestant.is_pipe:
                out.append(_baseline(case, standing.contestant.key, samples))
        for standing, samples in done.values():
            if standing.contestant.is_pipe:
                key = standing.contestant.key
                name = "socket" if options.connect else LIMITS[key.name]
                limit = limit_of(name, key.streams, {k: s for k, (_, s) in done.items()})
                out.append(_transfer(case, (key, samples), limit, options.pattern))
    return out


def limit_of(name: str, streams: int, done: Mapping[MethodKey, list[Sample]]) -> tuple[str, float]:
    """Return the label and the median GB/s of a baseline, with as many streams if it was measured so; else none."""
    measured = [key for key in done if key.name == name]
    if not measured:
        return "", 0.0
    nearest = min(measured, key=lambda key: abs(key.streams - streams))
    return nearest.label, Spread.of(rates(done[nearest])).p50


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
                out.append(verdict(key, case.tokens, kappa, rate, options.prefill_tokens_per_s))
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
    return Spread.of([sample.seconds for sample in samples]).p50


class OverlapStudies:
    """Runs and sums up transfers under simulated compute.

    Args:
        stage: The open stage.
        case: Its largest size.
        options: Chunk and prefill speed; without a speed, the compute takes as long as the transfer alone.
    """

    def __init__(self, stage: Stage, case: Case, options: Options) -> None:
        self._case, self._options = case, options
        self._chunk_blocks = max(1, min(options.chunk // options.block_size, case.blocks))
        self._tokens = case.blocks * stage.source.block_size
        self._runs: dict[tuple[MethodKey, str], list[tuple[float, float]]] = {}
        self._wrong: dict[tuple[MethodKey, str], int] = {}
        self._steps = 0

    def run(self, contestant: FlowContestant, serial_s: float, *, verify: bool) -> None:
        """Run every mode once.

        Args:
            contestant: The pipe.
            serial_s: Seconds that its transfer alone takes.
            verify: Compare every byte.

        Raises:
            BatonError: It failed.
        """
        speed = self._options.prefill_tokens_per_s
        compute_s = serial_s if speed is None else self._tokens / speed
        for mode in MODES:
            if not 0 < compute_s < MAX_COMPUTE_S:
                raise ConfigError(f"computing {self._tokens} tokens would take {compute_s:.3g} s", field="isl")
            answer = contestant.overlap(self._case, Study(mode, self._chunk_blocks, compute_s), verify=verify)
            self._steps = int(seconds(answer, "steps"))
            exposed = seconds(answer, "exposed")
            self._runs.setdefault((contestant.key, mode), []).append((compute_s, exposed))
            if verify:
                self._wrong[contestant.key, mode] = int(seconds(answer, "wrong"))
            if mode == "serial" and speed is None:
                compute_s = exposed  # what the transfer takes right now: the other modes are compared with this run

    def records(self) -> list[OverlapRecord]:
        """Return a record per pipe and mode; shares are medians of quotients within a turn."""
        out: list[OverlapRecord] = []
        for (key, mode), runs in self._runs.items():
            computes, exposed = [compute for compute, _ in runs], [seconds for _, seconds in runs]
            serial = [seconds for _, seconds in self._runs[key, "serial"]][: len(runs)]
            compute = Spread.of(computes).p50
            out.append(
                OverlapRecord(
                    pipe=key.name,
                    streams=key.streams,
                    mode=mode,
                    tokens=self._case.tokens,
                    chunk=self._chunk_blocks * self._options.block_size,
                    steps=self._steps,
                    prefill_tokens_per_s=round(self._tokens / compute, 1),
                    compute_ms=round(compute * 1e3, 3),
                    exposed_ms=round(Spread.of(exposed).p50 * 1e3, 3),
                    percent_of_serial=round(100 * paired_ratio(exposed, serial), 1),
                    verified=self._wrong.get((key, mode)) == 0,
                )
            )
        return out


def _baseline(case: Case, key: MethodKey, samples: Sequence[Sample]) -> BaselineRecord:
    spread = Spread.of([sample.seconds * 1e3 for sample in samples])
    return BaselineRecord(
        case=case.name,
        method=key.name,
        streams=key.streams,
        tokens=case.tokens,
        bytes=samples[0].bytes,
        runs=len(samples),
        p50_ms=round(spread.p50, 4),
        p95_ms=round(spread.p95, 4),
        p99_ms=round(spread.p99, 4),
        gb_per_s=round(Spread.of(rates(samples)).p50, 3),
        cpu_s_per_gb=round(_cpu_per_gb(samples), 4),
    )


def _transfer(
    case: Case, done: tuple[MethodKey, Sequence[Sample]], limit: tuple[str, float], pattern: str
) -> TransferRecord:
    key, samples = done
    spread, rate = Spread.of([sample.seconds * 1e3 for sample in samples]), Spread.of(rates(samples)).p50
    wrong = [sample.wrong for sample in samples if sample.wrong is not None]
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
        p50_ms=round(spread.p50, 4),
        p95_ms=round(spread.p95, 4),
        p99_ms=round(spread.p99, 4),
        gb_per_s=round(rate, 3),
        limit=limit[0],
        limit_gb_per_s=round(limit[1], 3),
        percent_of_limit=round(100 * rate / limit[1], 1) if limit[1] else 0.0,
        cpu_s_per_gb=round(_cpu_per_gb(samples), 4),
        verified=bool(wrong) and not any(wrong),
        wrong_blocks=sum(wrong),
    )


def _cpu_per_gb(samples: Sequence[Sample]) -> float:
    return sum(sample.cpu for sample in samples) / (sum(sample.bytes for sample in samples) / 1e9)


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
