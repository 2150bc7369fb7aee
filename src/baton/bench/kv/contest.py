"""Who takes part in a stage: pipes and baselines that run, one after the other, on the same blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.bench.kv.agents import OPEN_S, Agent, ask_all
from baton.bench.kv.control import from_fields, seconds, to_fields
from baton.bench.kv.methods import RUN_S
from baton.bench.kv.plan import Case, MethodKey, Stage
from baton.bench.kv.rivals import RIVALS
from baton.bench.kv.specs import OverlapSpec, RunSpec, SourceFacts, SourceSpec, TargetSpec
from baton.errors import BatonError, ConfigError, PipeClosedError

_VERIFY_S = 300.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: wall seconds, bytes moved, CPU seconds of all processes, and blocks found wrong (if verified)."""

    seconds: float
    bytes: int
    cpu: float
    wrong: int | None = None


@dataclass(frozen=True, slots=True)
class Study:
    """How a transfer overlaps: the mode, source blocks per chunk, and seconds of compute."""

    mode: str
    chunk_blocks: int
    compute_s: float


class Contestant(ABC):
    """A method that can be run on a case."""

    key: MethodKey
    is_pipe: bool

    @abstractmethod
    def once(self, case: Case, *, wipe: bool, verify: bool) -> Sample:
        """Run once.

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
        specs = [SourceSpec(i, seed, stage.source, stage.source_blocks, tuple(kinds)) for i in range(len(sources))]
        answers = ask_all(sources, "open_source", OPEN_S, [{"source": to_fields(spec)} for spec in specs])
        self.facts = tuple(from_fields(SourceFacts, answer.get("facts")) for answer in answers)
        targets_ = [TargetSpec(i, seed, stage.target, stage.target_blocks, self.facts) for i in range(len(targets))]
        ask_all(targets, "open_target", OPEN_S, [{"target": to_fields(spec)} for spec in targets_])

    def refusals(self) -> dict[str, str]:
        """Kinds that a source cannot offer, and why."""
        return {kind: reason for facts in self.facts for kind, reason in facts.refused}

    def close(self) -> None:
        """Free the stage's memory; the agents stay."""
        for agents in (self.targets, self.sources):
            ask_all(agents, "close", OPEN_S, [{}] * len(agents))


class FlowContestant(Contestant):
    """A method of the targets: a pipe, a copy, or bare sockets."""

    def __init__(self, key: MethodKey, opened: OpenStage, *, is_pipe: bool) -> None:
        self.key, self.is_pipe, self._opened = key, is_pipe, opened

    def once(self, case: Case, *, wipe: bool, verify: bool) -> Sample:
        """Run on all targets at once: from the first's start to the last's end."""
        spec = RunSpec(self.key.name, self.key.streams, case.blocks, case.shuffled, wipe, verify)
        before = self._source_cpu()
        orders = [{"run": to_fields(spec)}] * len(self._opened.targets)
        answers = ask_all(self._opened.targets, "run", RUN_S + _VERIFY_S, orders)
        cpu = self._source_cpu() - before + sum(seconds(answer, "cpu") for answer in answers)
        start = min(seconds(answer, "start") for answer in answers)
        end = max(seconds(answer, "end") for answer in answers)
        num_bytes = sum(int(seconds(answer, "bytes")) for answer in answers)
        wrong = sum(int(seconds(answer, "wrong")) for answer in answers) if verify else None
        return Sample(end - start, num_bytes, cpu, wrong)

    def overlap(self, case: Case, study: Study, *, verify: bool) -> Mapping[str, Any]:
        """Run one transfer under simulated compute; returns the target's answer.

        Args:
            case: The size.
            study: How.
            verify: Wipe the target's blocks before and compare them afterwards.
        """
        run = RunSpec(self.key.name, self.key.streams, case.blocks, case.shuffled, verify, verify)
        spec = OverlapSpec(run, study.mode, study.chunk_blocks, study.compute_s)
        return self._opened.targets[0].ask("overlap", RUN_S + _VERIFY_S, overlap=to_fields(spec))

    def _source_cpu(self) -> float:
        sources = self._opened.sources
        return sum(seconds(answer, "cpu") for answer in ask_all(sources, "cpu", OPEN_S, [{}] * len(sources)))


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
        about = {"kind": RIVALS[name][0], "num_blocks": stage.source_blocks, "block_bytes": size, "seed": seed}
        orders = [{**about, "role": role} for role in ("source", "target")]
        cards = [answer["card"] for answer in ask_all(agents, "open", OPEN_S, orders)]
        ask_all(agents, "meet", OPEN_S, [{"card": card} for card in reversed(cards)])

    def once(self, case: Case, *, wipe: bool, verify: bool) -> Sample:
        """Run; the source attends to its reader meanwhile."""
        run = to_fields(RunSpec(self.key.name, 1, case.blocks, case.shuffled))
        before = seconds(self._source.ask("cpu"), "cpu")
        self._source.tell("attend", run=run)
        try:
            answer = self._target.ask("run", RUN_S, run=run)
        finally:
            self._source.tell("stop")
            for _ in range(2):
                self._source.answer(RUN_S)
        cpu = seconds(self._source.ask("cpu"), "cpu") - before + seconds(answer, "cpu")
        return Sample(seconds(answer, "end") - seconds(answer, "start"), int(seconds(answer, "bytes")), cpu)


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

    def run(self, case: Case, *, count: bool, first: bool, wipe: bool, verify: bool) -> None:
        """Run once; keep the sample if it counts. A method that does not reach its peer at first is not available."""
        try:
            sample = self.contestant.once(case, wipe=wipe, verify=verify)
        except (ConfigError, PipeClosedError) as error:
            if first:
                self.unavailable = one_line(error)
            else:
                self.failure = one_line(error)
        except BatonError as error:
            self.failure = one_line(error)
        else:
            if count:
                self.samples.setdefault(case, []).append(sample)


def one_line(error: BatonError) -> str:
    """Return an error in one line."""
    return " ".join(error.message.split())[:500]
