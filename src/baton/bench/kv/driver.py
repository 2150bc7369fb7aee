"""Runs a benchmark: opens the stages, lets pipes and baselines take turns, and reports records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from baton.bench.core.agents import Agent, Fields, connect_agent, start_agent
from baton.bench.core.report import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_TOO_SLOW,
    EXIT_UNABLE,
    Record,
    Report,
    Spread,
    one_line,
    require_memory,
    run_with_result,
    shared_fields,
)
from baton.bench.kv.contest import Contestant, FlowContestant, OpenStage, OverlapStudies, RivalContestant, Standing
from baton.bench.kv.memory import device_of
from baton.bench.kv.plan import (
    MESSAGE_SIZES,
    SMALL_BYTES,
    Ends,
    MethodKey,
    Options,
    Stage,
    baseline_methods,
    model_stage,
    pipe_methods,
    reference_stage,
    small_stage,
)
from baton.bench.kv.records import SCHEMA_VERSION, MessagesRecord, RunRecord, UnavailableRecord
from baton.bench.kv.report import compute_ratios, median_rate, sample_seconds, stage_records, verdict_records
from baton.bench.kv.rivals import DEVICE_RIVALS, RIVALS
from baton.bench.kv.specs import HOST
from baton.errors import BatonError
from baton.rpc.service_token import read_token
from baton.version import __version__

AGENT_MODULE, RIVAL_MODULE = "baton.bench.kv.agent", "baton.bench.kv.rivals"
OVERLAP_ROUNDS = 5
SAMPLES = 2000
SAMPLE_S = 0.4
"""Longest time (seconds) for the small exchanges of one kind and size."""
Step = Callable[[str, int], None]
"""Told what runs now, and how many steps are still to come."""


class Driver:
    """One run.

    Args:
        options: What to measure.
        report: Gets each record as soon as it is known.
        step: Told of progress.
    """

    def __init__(self, options: Options, report: Report, step: Step) -> None:
        self._options, self._report, self._step = options, report, step
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
            ConfigError: It cannot be run as asked at all.
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
        sources, targets = self._options.num_sources, self._options.num_targets
        # Each target holds a copy of every source's blocks, and as much again for memcpy to copy from.
        there = 0 if self._options.connect else sources * stage.source.memory(stage.source_blocks)
        require_memory(there + 2 * targets * sources * stage.target.memory(stage.target_blocks))

    def _source(self, stack: contextlib.ExitStack, index: int) -> Agent:
        options, name = self._options, f"source {index}"
        if not options.connect:
            return self._agent(stack, name, token_file=options.token_file)
        agent, self._host = connect_agent(name, options.connect, self._token)
        return stack.enter_context(contextlib.closing(agent))

    def _agent(self, stack: contextlib.ExitStack, name: str, module: str = AGENT_MODULE, **options: Any) -> Agent:
        return stack.enter_context(contextlib.closing(start_agent(name, module, **options)))

    def _run_record(self, stage: Stage, source: Agent, target: Agent) -> RunRecord:
        options = self._options
        here, there = target.ask("hello", Fields), source.ask("hello", Fields)
        about: dict[str, Any] = {
            "schema": SCHEMA_VERSION,
            "version": __version__,
            "machine": here,
            "peer": there if options.connect else None,
            "pipes": options.asked,
            "geometry": options.label,
            "kv_bytes_per_token": stage.source.bytes_per_token if stage.name == "kv" else 0,
            "dst_block_size": options.dst_block_size or options.block_size,
            "dst_kv_dtype": options.dst_kv_dtype or options.kv_dtype,
        }
        return RunRecord(**(shared_fields(options, RunRecord) | about))

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
        """Start plain NIXL and gloo for the pipes that are built on them, where they are installed."""
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
        warmup, rounds = self._options.warmup, self._options.warmup + self._options.repeat
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
        case, options = max(stage.cases, key=lambda case: case.flow_bytes), self._options
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
        wanted, largest = self._options.require_gbps, max(stage.cases, key=lambda case: case.flow_bytes)
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
                self._report(UnavailableRecord(name, reason, name in (self._options.pipes or ()), ends.label))

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
