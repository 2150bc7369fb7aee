"""Who takes part in a stage: pipes and baselines that run, one after the other, on the same blocks."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.bench.core.agents import Agent, Fields, ask_all
from baton.bench.core.report import one_line, paired_ratio
from baton.bench.kv.methods import RUN_S
from baton.bench.kv.plan import Case, MethodKey, Options, Stage
from baton.bench.kv.records import OverlapRecord
from baton.bench.kv.rivals import RIVALS
from baton.bench.kv.specs import (
    MAX_COMPUTE_S,
    MODES,
    OverlapResult,
    OverlapSpec,
    RunResult,
    RunSpec,
    SourceFacts,
    SourceSpec,
    TargetSpec,
)
from baton.errors import BatonError, ConfigError, PipeClosedError

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
            BatonError: It cannot, or failed.
        """


class OpenStage:
    """A stage's sources and targets, opened.

    Args:
        stage: What to open.
        sources: Agents of the sources.
        targets: Agents of the targets.
        kinds: Pipes that sources offer.
        seed: Of the patterns.
    """

    def __init__(
        self, stage: Stage, sources: Sequence[Agent], targets: Sequence[Agent], kinds: Sequence[str], seed: int
    ) -> None:
        self.stage, self.sources, self.targets = stage, sources, targets
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
        self.key, self.is_pipe, self._opened = key, is_pipe, opened

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
        """Run one transfer under simulated compute; see :class:`~baton.bench.kv.specs.OverlapSpec`."""
        spec = OverlapSpec(self._spec(case, verify=verify), mode, chunk_blocks, compute_s)
        return self._opened.targets[0].ask("overlap", OverlapResult, RUN_S + _VERIFY_S, overlap=spec)

    def _spec(self, case: Case, *, verify: bool) -> RunSpec:
        return RunSpec(self.key.name, self.key.streams, case.blocks, case.shuffled, verify, verify)


class RivalContestant(Contestant):
    """Plain NIXL or gloo between two agents of its own.

    Args:
        name: One of ``RIVALS``.
        agents: Its source and its target, not opened yet.
        stage: Whose block size and number it takes.
        seed: Of the blocks' order.

    Raises:
        ConfigError: It cannot work here; says why.
    """

    is_pipe = False

    def __init__(self, name: str, agents: tuple[Agent, Agent], stage: Stage, seed: int) -> None:
        self.key, (self._source, self._target) = MethodKey(name), agents
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
        self._source.tell("attend", run=run)
        try:
            result = self._target.ask("run", RunResult, RUN_S, run=run)
        finally:
            self._source.tell("stop")
            for _ in range(2):
                self._source.answer(Fields, RUN_S)
        return Sample(result.end - result.start, result.bytes, self._source_cpu() - before + result.cpu)

    def _source_cpu(self) -> float:
        return self._source.ask("cpu", dict[str, float])["cpu"]


@dataclass
class Standing:
    """What is known of one contestant: samples per case, or why there are none."""

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
        case: Its largest size.
        options: Chunk and prefill speed; without a speed, the compute takes as long as the transfer alone.
    """

    def __init__(self, stage: Stage, case: Case, options: Options) -> None:
        self._case, self._options, self._ends = case, options, stage.ends
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
