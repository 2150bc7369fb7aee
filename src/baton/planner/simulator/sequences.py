"""What simulated instances work on, whom they tell of it, and what a step of theirs costs."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from baton.bench.core.traces import BLOCK_TOKENS
from baton.engine.step_budget import StepCost, StepWork
from baton.planner.profile import EngineProfile

_LEARNT = 1 << 29


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: tokens drafted per step and sequence, and the chance that each is accepted."""

    tokens: int = 0
    acceptance: float = 0.0

    @property
    def per_step(self) -> float:
        """Tokens per step, on average (Leviathan et al., ICML 2023, equation 1)."""
        if self.acceptance >= 1.0:
            return 1.0 + self.tokens
        return (1 - self.acceptance ** (self.tokens + 1)) / (1 - self.acceptance)


class SimulatedSequence:
    """A request on one instance.

    Attributes:
        key: Order of arrival.
        base: Tokens of its prompt.
        prompt: Tokens that have to be there before the next one is generated: after a preemption also its output.
        target: Tokens that it generates.
        names: Of its prompt's full blocks of 512 tokens.
        pinned: It computes a prompt for another instance: its blocks are kept until they are read.
        computed: How many of ``prompt`` are there.
        output: Tokens generated, as of ``joined``; an average with speculation.
        joined: The instance's step from which it decodes.
        private: Tokens of the pool that it holds beside ``names``, as of ``joined``.
        first_at, last_at: When its first token came, and the last one before it decodes.
        slices: Parts of its instance's steps in which it decoded: first entry, end, and seconds it waited before.
    """

    __slots__ = (
        "base", "computed", "first_at", "joined", "key", "last_at", "names", "num_passed", "num_preemptions", "output",
        "pinned", "private", "prompt", "slice_start", "slices", "target", "wait",
    )  # fmt: skip

    def __init__(self, key: int, prompt: int, target: int, names: SequenceOf[int], *, pinned: bool = False) -> None:
        self.key, self.base, self.prompt, self.target, self.pinned = key, prompt, prompt, target, pinned
        self.names = tuple(names[: prompt // BLOCK_TOKENS])
        self.computed = self.num_passed = self.num_preemptions = self.slice_start = 0
        self.output = self.private = self.joined = self.wait = 0.0
        self.first_at = self.last_at = math.nan
        self.slices: list[tuple[int, int, float]] = []

    @property
    def missing(self) -> int:
        """Tokens to compute."""
        return self.prompt - self.computed

    @property
    def to_come(self) -> float:
        """Tokens to generate; none for a prompt that is computed for another instance."""
        return 0.0 if self.pinned else self.target - self.output


class ProfiledCost(StepCost):
    """The time of steps where it is known: what the engine learns while it runs (:class:`StepCost`), learnt."""

    def __init__(self, engine: EngineProfile) -> None:
        super().__init__()
        self._engine = engine
        self.most_prompt_tokens = _LEARNT
        self._begun = False

    def predict(self, work: StepWork) -> float:
        """Return the seconds that a step takes."""
        self._begun = work.prompt_tokens > 0
        return self._engine.step_s(work.rows, work.decode_context, work.prompt_tokens, work.prompt_attention)

    def affordable(self, seconds: float, start: int) -> int:
        """Return how many tokens of a prompt from position ``start`` on take at most ``seconds`` more."""
        cost = self._engine.prefill
        if seconds == math.inf:
            return 1 << 30
        if not self._begun:  # a step's first prompt has the fixed part, and what prompts share with the decodes
            share, fixed = self._engine.overlap, self._engine.decode.fixed_s
            hidden = min(share * fixed, seconds * share / (1 - share)) if share < 1 else fixed
            seconds += hidden - cost.fixed_s
        if seconds <= 0.0:
            return 0
        linear = cost.per_token_s + cost.per_pair_s * start
        if linear <= 0.0 and cost.per_pair_s <= 0.0:
            return 1 << 30
        return int(2.0 * seconds / (linear + math.sqrt(linear * linear + 2.0 * cost.per_pair_s * seconds)))


@dataclass(frozen=True, slots=True)
class GrowingSequence:
    """A sequence as the engine's forecast of blocks sees it (:class:`baton.engine.growth.Growing`)."""

    pinned: bool
    num_output: int
    max_output: int
    num_tokens: int
    block_ids: range

    @property
    def all_blocks(self) -> range:
        """Its blocks."""
        return self.block_ids
