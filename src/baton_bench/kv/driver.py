"""Runs a benchmark: opens the stages, lets pipes and baselines take turns, and reports records."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.errors import BatonError, ConfigError, PipeClosedError
from baton.rpc.service_token import read_token
from baton.terminal import Step
from baton.version import __version__
from baton_bench.agents import Agent, Fields, ask_all, connect_agent, start_agent
from baton_bench.kv.memory import device_of
from baton_bench.kv.methods import RUN_S
from baton_bench.kv.plan import (
    DEVICE_PIPES,
    HOST,
    HOST_ENDS,
    MAX_COMPUTE_S,
    MESSAGE_SIZES,
    MODES,
    SMALL_BYTES,
    Case,
    Ends,
    MethodKey,
    Options,
    OverlapResult,
    OverlapSpec,
    RunResult,
    RunSpec,
    SourceFacts,
    SourceSpec,
    Stage,
    TargetSpec,
    baseline_methods,
    model_stage,
    pipe_methods,
    reference_stage,
    small_stage,
)
from baton_bench.kv.records import (
    SCHEMA_VERSION,
    BaselineRecord,
    MessagesRecord,
    OverlapRecord,
    RatioRecord,
    RunRecord,
    TransferRecord,
    UnavailableRecord,
    VerdictRecord,
)
from baton_bench.kv.rivals import DEVICE_RIVALS, RIVALS
from baton_bench.report import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_TOO_SLOW,
    EXIT_UNABLE,
    Record,
    Report,
    Spread,
    build_from,
    one_line,
    paired_ratio,
    require_memory,
    run_with_result,
)

_VERIFY_S = 300.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: wall seconds, bytes moved, CPU seconds of all processes, and blocks found wrong (if verified)."""

    seconds: float
    bytes: int
    cpu: float
    wrong: int | None = None


class Contestant(ABC):
    """A method that can be run on a case."""

    key: MethodKey
    is_pipe: bool

    @abstractmethod
    def once(self, case: Case, *, verify: bool) -> Sample:
        """Run once; ``verify``: wipe the target's blocks before and compare them afterwards.

        Raises:
            BatonError: The method does not work here, or failed.
        """


class OpenStage:
    """A stage's sources and targets, opened.

    Args:
        stage: Stage to open.
        sources: Agents of the sources.
        targets: Agents of the targets.
        kinds: Pipes that sources offer.
        seed: Seed of the patterns.
    """

    def __init__(
        self, stage: Stage, sources: Sequence[Agent], targets: Sequence[Agent], kinds: Sequence[str], seed: int
    ) -> None:
        self.stage = stage
        self.sources = sources
        self.targets = targets
        ends = stage.ends
        about = seed, stage.source, stage.source_blocks, tuple(kinds), ends.source
        specs = [SourceSpec(i, *about) for i in range(len(sources))]
        answers = ask_all(sources, "open_source", dict[str, SourceFacts], each=[{"source": spec} for spec in specs])
        self.facts = tuple(answer["facts"] for answer in answers)
        wanted = seed, stage.target, stage.target_blocks, self.facts, ends.target, ends.source
        readers = [TargetSpec(i, *wanted) for i in range(len(targets))]
        ask_all(targets, "open_target", Fields, each=[{"target": spec} for spec in readers])

    def refusals(self) -> dict[str, str]:
        """Kinds that a source cannot offer, and why."""
        return {kind: reason for facts in self.facts for kind, reason in facts.refused}

    def source_cpu(self) -> float:
        """CPU seconds that the sources have used."""
        return sum(answer["cpu"] for answer in ask_all(self.sources, "cpu", dict[str, float]))

    def close(self) -> None:
        """Free the stage's memory; the agents stay."""
        for agents in (self.targets, self.sources):
            ask_all(agents, "close", Fields)


class FlowContestant(Contestant):
    """A method of the targets: a pipe, a copy, or bare sockets."""

    def __init__(self, key: MethodKey, opened: OpenStage, *, is_pipe: bool) -> None:
        self.key = key
        self.is_pipe = is_pipe
        self._opened = opened

    def once(self, case: Case, *, verify: bool) -> Sample:
        """Run on all targets at once: from the first's start to the last's end."""
        before = self._opened.source_cpu()
        run = self._spec(case, verify=verify)
        results = ask_all(self._opened.targets, "run", RunResult, RUN_S + _VERIFY_S, run=run)
        cpu = self._opened.source_cpu() - before + sum(result.cpu for result in results)
        took = max(result.end for result in results) - min(result.start for result in results)
        wrong = sum(result.wrong or 0 for result in results) if verify else None
        return Sample(took, sum(result.bytes for result in results), cpu, wrong)

    def overlap(self, case: Case, mode: str, chunk_blocks: int, compute_s: float, *, verify: bool) -> OverlapResult:
        """Run one transfer under simulated compute; see :class:`~baton_bench.kv.plan.OverlapSpec`."""
        spec = OverlapSpec(self._spec(case, verify=verify), mode, chunk_blocks, compute_s)
        return self._opened.targets[0].ask("overlap", OverlapResult, RUN_S + _VERIFY_S, overlap=spec)

    def _spec(self, case: Case, *, verify: bool) -> RunSpec:
        return RunSpec(self.key.name, self.key.streams, case.blocks, case.shuffled, verify, verify)


class RivalContestant(Contestant):
    """Plain NIXL or gloo between two agents of its own.

    Args:
        name: One of ``RIVALS``.
        agents: Source agent and target agent of the pair, not opened yet.
        stage: Stage whose block size and number of blocks are used.
        seed: Seed of the blocks' order.

    Raises:
        ConfigError: It does not work here; the message says why.
    """

    is_pipe = False

    def __init__(self, name: str, agents: tuple[Agent, Agent], stage: Stage, seed: int) -> None:
        self.key = MethodKey(name)
        (self._source, self._target) = agents
        size = stage.source.layouts()[0].block_bytes
        about: dict[str, Any] = {
            "kind": RIVALS[name][0],
            "num_blocks": stage.source_blocks,
            "block_bytes": size,
            "seed": seed,
        }
        ends = (("source", stage.ends.source), ("target", stage.ends.target))
        roles = [{"role": role, "memory": memory} for role, memory in ends]
        cards = [answer["card"] for answer in ask_all(agents, "open", Fields, each=roles, **about)]
        ask_all(agents, "meet", Fields, each=[{"card": card} for card in reversed(cards)])

    def once(self, case: Case, *, verify: bool) -> Sample:
        """Run; the source attends to its reader meanwhile. Nothing is verified: no byte of it is Baton's."""
        run = RunSpec(self.key.name, 1, case.blocks, case.shuffled)
        before = self._source_cpu()
        self._source.send_order("attend", run=run)
        try:
            result = self._target.ask("run", RunResult, RUN_S, run=run)
        finally:
            self._source.send_order("stop")
            for _ in range(2):
                self._source.answer(Fields, RUN_S)
        return Sample(result.end - result.start, result.bytes, self._source_cpu() - before + result.cpu)

    def _source_cpu(self) -> float:
        return self._source.ask("cpu", dict[str, float])["cpu"]


@dataclass
class Standing:
    """Samples of one contestant per case, or why there are none."""

    contestant: Contestant
    samples: dict[Case, list[Sample]] = field(default_factory=dict)
    unavailable: str = ""
    failure: str = ""

    @property
    def out(self) -> bool:
        """Whether it runs no more."""
        return bool(self.unavailable or self.failure)

    def run(self, case: Case, *, count: bool, first: bool, verify: bool) -> None:
        """Run once; keep the sample if it counts. A method that does not reach its peer at first is not available."""
        try:
            sample = self.contestant.once(case, verify=verify)
        except BatonError as error:
            if first and isinstance(error, (ConfigError, PipeClosedError)):
                self.unavailable = one_line(error)
            else:
                self.failure = one_line(error)
        else:
            if count:
                self.samples.setdefault(case, []).append(sample)


class OverlapStudies:
    """Runs and sums up transfers under simulated compute.

    Args:
        stage: The open stage.
        case: Largest size of the stage.
        options: Chunk and prefill speed; without a speed, the compute takes as long as the transfer alone.
    """

    def __init__(self, stage: Stage, case: Case, options: Options) -> None:
        self._case = case
        self._options = options
        self._ends = stage.ends
        self._chunk_blocks = max(1, min(options.chunk // options.block_size, case.blocks))
        self._tokens = case.blocks * stage.source.block_size
        self._runs: dict[tuple[MethodKey, str], list[tuple[float, OverlapResult]]] = {}

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
            result = contestant.overlap(self._case, mode, self._chunk_blocks, compute_s, verify=verify)
            self._runs.setdefault((contestant.key, mode), []).append((compute_s, result))
            if mode == "serial" and speed is None:
                compute_s = result.exposed  # what the transfer takes right now: the other modes are compared with it

    def records(self) -> list[OverlapRecord]:
        """Return a record per pipe and mode; shares are medians of quotients within a turn."""
        out: list[OverlapRecord] = []
        for (key, mode), runs in self._runs.items():
            exposed = [result.exposed for _, result in runs]
            serial = [result.exposed for _, result in self._runs[key, "serial"]][: len(runs)]
            compute = statistics.median(compute for compute, _ in runs)
            out.append(
                OverlapRecord(
                    pipe=key.name,
                    streams=key.streams,
                    mode=mode,
                    tokens=self._case.tokens,
                    chunk=self._chunk_blocks * self._options.block_size,
                    steps=runs[-1][1].steps,
                    prefill_tokens_per_s=round(self._tokens / compute, 1),
                    compute_ms=round(compute * 1e3, 3),
                    exposed_ms=round(statistics.median(exposed) * 1e3, 3),
                    percent_of_serial=round(100 * paired_ratio(exposed, serial), 1),
                    verified=runs[-1][1].wrong == 0,
                    memory=self._ends.label,
                )
            )
        return out


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
        out += [
            BaselineRecord(method=key.name, **_timed(case, key, samples, stage.ends.label))
            for key, samples in done.items()
            if key not in pipes
        ]
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
    flows = options.num_sources * options.num_targets
    out = []
    for case in stage.cases:
        for standing in standings:
            if standing.contestant.is_pipe and standing.samples.get(case):
                rate = case.flow_bytes * flows / sample_seconds(standing.samples[case]) / 1e9
                key = standing.contestant.key
                kappa = stage.source.bytes_per_token
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


def _timed(case: Case, key: MethodKey, samples: Sequence[Sample], memory: str) -> dict[str, Any]:
    """Return what the records of pipes and of baselines have in common."""
    spread = Spread.of([sample.seconds * 1e3 for sample in samples])
    moved = sum(sample.bytes for sample in samples)
    return {
        "case": case.name,
        "streams": key.streams,
        "tokens": case.tokens,
        "bytes": samples[0].bytes,
        "runs": len(samples),
        "gb_per_s": round(median_rate(samples), 3),
        "cpu_s_per_gb": round(sum(sample.cpu for sample in samples) / (moved / 1e9), 4),
        "memory": memory,
        **{f"{name}_ms": round(value, 4) for name, value in dataclasses.asdict(spread).items()},
    }


def _transfer(
    case: Case, key: MethodKey, samples: Sequence[Sample], limit: tuple[str, float], pattern: str, memory: str
) -> TransferRecord:
    wrong = [sample.wrong for sample in samples if sample.wrong is not None]
    return TransferRecord(
        pipe=key.name,
        pattern=pattern,
        blocks=case.blocks,
        block_bytes=case.flow_bytes // case.blocks,
        limit=limit[0],
        limit_gb_per_s=round(limit[1], 3),
        percent_of_limit=round(100 * median_rate(samples) / limit[1], 1) if limit[1] else 0.0,
        verified=bool(wrong) and not any(wrong),
        wrong_blocks=sum(wrong),
        **_timed(case, key, samples, memory),
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

    Others have no checksums: TCP is compared without its own, the cost of checksums is a separate ratio, and
    against bare sockets it should hold with them too.
    """

    def aim(top: MethodKey, bottom: MethodKey, least: float | None, case: str = "contiguous") -> Aim:
        name = f"{top.label} / {_TITLES.get(bottom.name, bottom.label)}, {case}"
        return Aim(name, (case, top), (case, bottom), least)

    shm, memcpy, nixl, nixl_tcp = map(MethodKey, ("shm", "memcpy", "nixl-bare", "nixl-tcp-bare"))
    most = max(streams)
    fewest = min(streams)
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
    """Return every ratio with both sides measured: medians over runs that took turns.

    Args:
        standings: Standings of all stages of these ends.
        others: Records of small exchanges and of overlap, which have aims of their own in host memory.
        ends: Where blocks lie.
    """
    result: dict[tuple[str, MethodKey], list[Sample]] = {}
    for standing in standings:
        for case, samples in standing.samples.items():
            result[case.name, standing.contestant.key] = samples
    streams = sorted({key.streams for _, key in result if key.name == "tcp"}) or [1]
    out: list[RatioRecord] = []
    for aim in device_aims(result, ends) if ends.on_device else aims(streams):
        top = result.get(aim.top)
        bottom = result.get(aim.bottom)
        if top and bottom and len(top) == len(bottom):
            value = paired_ratio([s.bytes / s.seconds for s in top], [s.bytes / s.seconds for s in bottom])
            met = None if aim.least is None else value >= aim.least
            out.append(RatioRecord(aim.name, round(value, 3), "ratio", ">=", aim.least, met))
    for record in () if ends.on_device else others:
        if isinstance(record, MessagesRecord) and (record.pipe, record.bytes) == ("shm", SMALL_BYTES):
            name = f"shm 4 KiB {record.what}, p50"
            value = record.p50_us
            met = value <= READ_US if record.what == "read" else None
            out.append(RatioRecord(name, value, "us", "<=", None if met is None else READ_US, met))
        elif isinstance(record, OverlapRecord) and record.mode == "layer-wise":
            name = f"{MethodKey(record.pipe, record.streams).label} exposed, layer-wise / serial"
            value = record.percent_of_serial / 100
            out.append(RatioRecord(name, round(value, 3), "ratio", "<=", EXPOSED_SHARE, value <= EXPOSED_SHARE))
    return out


AGENT_MODULE = "baton_bench.kv.agent"
RIVAL_MODULE = "baton_bench.kv.rivals"
OVERLAP_ROUNDS = 5
SAMPLES = 2000
SAMPLE_S = 0.4
"""Longest time (seconds) for the small exchanges of one kind and size."""


class Driver:
    """One run.

    Args:
        options: Options of the command line.
        report: Gets each record as soon as it is known.
        step: Called with the name of each step and the number of steps left.
    """

    def __init__(self, options: Options, report: Report, step: Step) -> None:
        self._options = options
        self._report = report
        self._step = step
        self._token = read_token(options.token_file)
        # Address of this machine that sources reach it by; another host's are asked over a connection that knows it.
        self._host = "127.0.0.1"
        self._unavailable: dict[tuple[Ends, str], str] = {}
        self._failures: list[str] = []
        self._slow: list[str] = []
        self._left = 0
        self._standings: dict[Ends, list[Standing]] = {ends: [] for ends in options.ends}
        self._others: dict[Ends, list[Record]] = {ends: [] for ends in options.ends}

    def run(self) -> int:
        """Measure everything; returns the exit status.

        Raises:
            ConfigError: The options cannot work together.
            BatonError: An agent ended, or the other host is out of reach.
        """
        stages: list[Stage] = []
        for ends in self._options.ends:
            for memory in {ends.target, "" if self._options.connect else ends.source} - {HOST, ""}:
                device_of(memory)  # refused before anything is started
            stages += [model_stage(self._options, ends), *([reference_stage(ends)] if self._with_reference() else [])]
        self._require_memory(stages[0])
        return run_with_result(lambda: self._measure(stages), self._report)

    def _measure(self, stages: list[Stage]) -> tuple[int, list[str]]:
        options = self._options
        rounds = options.warmup + options.repeat
        methods = {each.name: len(pipe_methods(options)) + len(baseline_methods(options, each.name)) for each in stages}
        self._left = sum(len(each.cases) * methods[each.name] for each in stages) * rounds
        self._left += len(options.asked) * len(options.ends)
        with contextlib.ExitStack() as stack:
            sources = [self._source(stack, i) for i in range(options.num_sources)]
            targets = [
                self._agent(stack, f"target {i}", host=self._host, token_file=options.token_file)
                for i in range(options.num_targets)
            ]
            self._report(self._run_record(stages[0], sources[0], targets[0]))
            for each in stages:
                self._run_stage(each, sources, targets)
                if each.name == "reference":
                    self._small(each.ends, sources, targets)
        for ends in options.ends:
            for ratio in compute_ratios(self._standings[ends], self._others[ends], ends):
                self._report(ratio)
        code = self._exit_code()
        return code, [*self._failures, *self._slow, *(f"{name}: {why}" for name, why in self._asked_in_vain())]

    def _with_reference(self) -> bool:
        return self._options.reference and self._options.pattern == "1-1"

    def _require_memory(self, stage: Stage) -> None:
        sources = self._options.num_sources
        targets = self._options.num_targets
        # Each target holds a copy of every source's blocks, and as much again for memcpy to copy from.
        there = 0 if self._options.connect else sources * stage.source.memory(stage.source_blocks)
        require_memory(there + 2 * targets * sources * stage.target.memory(stage.target_blocks))

    def _source(self, stack: contextlib.ExitStack, index: int) -> Agent:
        options = self._options
        name = f"source {index}"
        if not options.connect:
            return self._agent(stack, name, token_file=options.token_file)
        agent, self._host = connect_agent(name, options.connect, self._token)
        return stack.enter_context(contextlib.closing(agent))

    def _agent(self, stack: contextlib.ExitStack, name: str, module: str = AGENT_MODULE, **options: Any) -> Agent:
        return stack.enter_context(contextlib.closing(start_agent(name, module, **options)))

    def _run_record(self, stage: Stage, source: Agent, target: Agent) -> RunRecord:
        options = self._options
        here = target.ask("hello", Fields)
        there = source.ask("hello", Fields)
        return build_from(
            RunRecord,
            options,
            schema=SCHEMA_VERSION,
            version=__version__,
            machine=here,
            peer=there if options.connect else None,
            pipes=options.asked,
            geometry=options.label,
            kv_bytes_per_token=stage.source.bytes_per_token if stage.name == "kv" else 0,
            dst_block_size=options.dst_block_size or options.block_size,
            dst_kv_dtype=options.dst_kv_dtype or options.kv_dtype,
        )

    def _run_stage(self, stage: Stage, sources: list[Agent], targets: list[Agent]) -> None:
        opened = OpenStage(stage, sources, targets, self._options.asked, self._options.seed)
        self._note_unavailable(stage.ends, opened.refusals())
        with contextlib.ExitStack() as stack:
            rivals = self._rivals(stage, stack) if stage.name == "reference" else []
            standings = [Standing(contestant) for contestant in [*self._contestants(opened), *rivals]]
            self._take_turns(stage, standings)
            if self._options.overlap and stage.name == "kv":
                self._overlap(stage, standings)
        opened.close()
        for standing in standings:
            key = standing.contestant.key
            if standing.unavailable:
                self._note_unavailable(stage.ends, {key.name: standing.unavailable})
            if standing.failure:
                self._failures.append(f"{_named(key, stage.ends)}, {stage.name}: {standing.failure}")
        self._standings[stage.ends] += standings
        records = stage_records(stage, standings, self._options)
        for record in records:
            self._report(record)
        if stage.name != "reference":
            self._judge(stage, standings)
            for verdict in verdict_records(stage, standings, self._options):
                self._report(verdict)

    def _contestants(self, opened: OpenStage) -> list[Contestant]:
        ends = opened.stage.ends
        pipes = [key for key in pipe_methods(self._options) if (ends, key.name) not in self._unavailable]
        return [
            *(FlowContestant(key, opened, is_pipe=False) for key in baseline_methods(self._options, opened.stage.name)),
            *(FlowContestant(key, opened, is_pipe=True) for key in pipes),
        ]

    def _rivals(self, stage: Stage, stack: contextlib.ExitStack) -> list[Contestant]:
        """Start plain NIXL and gloo, if installed, to compare with the pipes that use them."""
        out: list[Contestant] = []
        for name, (pipe, env) in RIVALS.items():
            if pipe not in self._options.asked or self._options.connect:
                continue
            if stage.ends.on_device and name not in DEVICE_RIVALS:
                continue
            source, target = (
                self._agent(stack, f"{name} {role}", RIVAL_MODULE, env=env) for role in ("source", "target")
            )
            try:
                out.append(RivalContestant(name, (source, target), stage, self._options.seed))
            except BatonError as error:
                self._note_unavailable(stage.ends, {name: one_line(error)})
        return out

    def _take_turns(self, stage: Stage, standings: list[Standing]) -> None:
        """Run every method on every case once per round, so that the machine's other work hits all alike."""
        warmup = self._options.warmup
        rounds = self._options.warmup + self._options.repeat
        for turn in range(rounds):
            check = self._options.verify and turn == rounds - 1
            for case in stage.cases:
                for standing in standings:
                    who = standing.contestant
                    self._advance(f"{case.name} {case.tokens or ''} {who.key.label}")
                    if not standing.out:
                        standing.run(case, count=turn >= warmup, first=turn == 0, verify=check and who.is_pipe)

    def _overlap(self, stage: Stage, standings: list[Standing]) -> None:
        """Study every pipe at the largest size; the modes take turns too."""
        case = max(stage.cases, key=lambda case: case.flow_bytes)
        options = self._options
        studies = OverlapStudies(stage, case, options)
        contestants = [
            (standing.contestant, sample_seconds(standing.samples[case]))
            for standing in standings
            if isinstance(standing.contestant, FlowContestant) and standing.contestant.is_pipe and not standing.out
        ]
        rounds = min(OVERLAP_ROUNDS, options.repeat)
        for turn in range(rounds):
            for contestant, serial_s in list(contestants):
                self._advance(f"overlap {contestant.key.label}")
                try:
                    studies.run(contestant, serial_s, verify=options.verify and turn == rounds - 1)
                except BatonError as error:
                    self._failures.append(f"{_named(contestant.key, stage.ends)}, overlap: {one_line(error)}")
                    contestants.remove((contestant, serial_s))
        for record in studies.records():
            self._others[stage.ends].append(record)
            self._report(record)
            if options.verify and not record.verified:
                self._failures.append(f"{record.pipe}, overlap {record.mode}: wrong blocks")

    def _judge(self, stage: Stage, standings: list[Standing]) -> None:
        """Hold the pipes against ``--require-gbps``, at the largest size."""
        wanted = self._options.require_gbps
        largest = max(stage.cases, key=lambda case: case.flow_bytes)
        for standing in standings:
            samples = standing.samples.get(largest)
            if wanted is None or not standing.contestant.is_pipe or not samples:
                continue
            rate = median_rate(samples)
            if rate < wanted:
                name = _named(standing.contestant.key, stage.ends)
                self._slow.append(f"{name}: {rate:.3g} GB/s, required {wanted:g}")

    def _small(self, ends: Ends, sources: list[Agent], targets: list[Agent]) -> None:
        """Measure round trips of small messages and reads of single small blocks, first source to first target."""
        opened = OpenStage(small_stage(ends), sources[:1], targets[:1], self._options.asked, self._options.seed)
        for kind in self._options.asked:
            self._advance(f"small {kind}")
            try:
                if (ends, kind) not in self._unavailable:
                    if ends.target == HOST:  # a read by itself ends in host memory
                        self._sample(ends, targets[0], "reads", kind, "read", SMALL_BYTES)
                    self._sample(ends, targets[0], "fetches", kind, "fetch", SMALL_BYTES)
            except BatonError as error:
                self._failures.append(f"{_named(MethodKey(kind), ends)}, small: {one_line(error)}")
        if "tcp" in self._options.asked and not ends.on_device:
            for size in MESSAGE_SIZES:
                self._sample(ends, targets[0], "round_trips", "tcp", "round trip", size)
            self._sample(ends, targets[0], "fetches", "socket", "round trip", SMALL_BYTES)
        opened.close()

    def _sample(self, ends: Ends, target: Agent, order: str, pipe: str, what: str, size: int) -> None:
        about = {"size": size} if order == "round_trips" else {"kind": pipe}
        answer = target.ask(order, dict[str, list[float]], count=SAMPLES, limit_s=SAMPLE_S, **about)
        samples = answer["seconds"]
        spread = Spread.of([sample * 1e6 for sample in samples])
        record = MessagesRecord(
            pipe=pipe,
            what=what,
            bytes=size,
            count=len(samples),
            p50_us=round(spread.p50, 2),
            p95_us=round(spread.p95, 2),
            p99_us=round(spread.p99, 2),
            per_s=round(len(samples) / sum(samples), 1),
            memory=ends.label,
        )
        self._others[ends].append(record)
        self._report(record)

    def _note_unavailable(self, ends: Ends, reasons: dict[str, str]) -> None:
        for name, reason in reasons.items():
            if (ends, name) not in self._unavailable:
                self._unavailable[ends, name] = reason
                self._report(UnavailableRecord(name, reason, name in (self._options.pipes or ()), memory=ends.label))

    def _asked_in_vain(self) -> list[tuple[str, str]]:
        """Return the named pipes that work between no two kinds of memory that were measured, and why."""
        first = self._options.ends[0]
        return [
            (name, self._unavailable[first, name])
            for name in self._options.pipes or ()
            if all((ends, name) in self._unavailable for ends in self._options.ends)
        ]

    def _exit_code(self) -> int:
        everyone = [(ends, standing) for ends, standings in self._standings.items() for standing in standings]
        wrong = [
            f"{_named(standing.contestant.key, ends)}: {sample.wrong} wrong blocks"
            for ends, standing in everyone
            for samples in standing.samples.values()
            for sample in samples
            if sample.wrong
        ]
        self._failures += wrong
        if self._failures:
            return EXIT_FAILED
        if self._asked_in_vain() or not any(s.samples for _, s in everyone if s.contestant.is_pipe):
            return EXIT_UNABLE
        return EXIT_TOO_SLOW if self._slow else EXIT_OK

    def _advance(self, what: str) -> None:
        self._left = max(0, self._left - 1)
        self._step(what, self._left)


def _named(key: MethodKey, ends: Ends) -> str:
    """Name a method, and where it copies from and to where that is not host memory."""
    return f"{key.label}, {ends.label}" if ends.on_device else key.label
