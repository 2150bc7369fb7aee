"""One simulated instance: the engine's scheduler, with steps that take the time that the profile says.

The rules are the engine's own (:mod:`baton.engine.scheduler`): decodes first, prompts in chunks under the budget of
tokens and, on decode instances, of time (:class:`~baton.engine.step_budget.StepBudget` itself), admission with all of
a prompt's blocks while the expected outputs have room (:class:`~baton.engine.scheduler.BlockForecast` itself),
preemption of the last. Blocks are counted in tokens, half a block more per sequence for its last one. Steps that differ
in nothing but the length of contexts are taken together, so that hours are replayed in seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from baton.engine.scheduler import LOOKAHEAD, PASSES, BlockForecast, OutputLengths
from baton.engine.step_budget import PrefillRoom, StepBudget, StepCost, StepWork
from baton.types import Role
from baton_bench.simulator.profile import EngineProfile, Limits
from baton_bench.simulator.router import OnBlocksChanged, PrefixCache
from baton_bench.simulator.timeline import Event, Processors, Timeline
from baton_bench.traces import BLOCK_TOKENS

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
        base: Prompt tokens.
        prompt: Tokens to compute before the next one is generated: after a preemption also its output.
        target: Tokens to generate.
        names: Names of its prompt's full blocks.
        pinned: Whether its prompt is computed for another instance: its blocks are kept until they are read.
        computed: Number of the ``prompt`` tokens whose KV is in the pool.
        matched: Prompt tokens found in the prefix cache when it was admitted first.
        admitted_at: Time at which it was admitted first.
        output: Tokens generated, as of ``joined``; an average with speculation.
        joined: The instance's step from which it decodes.
        private: Tokens of the pool that it uses beside ``names``, as of ``joined``.
        first_at, last_at: Times of its first token, and of the last one before it decodes.
        slices: Parts of its instance's steps in which it decoded: first entry, end, and seconds it waited before.
    """

    __slots__ = (
        "admitted_at", "base", "computed", "first_at", "joined", "key", "last_at", "matched", "names", "num_passed",
        "num_preemptions", "output", "pinned", "private", "prompt", "slice_start", "slices", "target", "wait",
    )  # fmt: skip

    def __init__(self, key: int, prompt: int, target: int, names: SequenceOf[int], *, pinned: bool = False) -> None:
        self.key = key
        self.base = prompt
        self.prompt = prompt
        self.target = target
        self.pinned = pinned
        self.names = tuple(names)
        self.computed = self.matched = self.num_passed = self.num_preemptions = self.slice_start = 0
        self.output = self.private = self.joined = self.wait = 0.0
        self.admitted_at = self.first_at = self.last_at = math.nan
        self.slices: list[tuple[int, int, float]] = []

    @property
    def missing(self) -> int:
        return self.prompt - self.computed

    @property
    def to_come(self) -> float:
        """Tokens to generate; none for a prompt that is computed for another instance."""
        return 0.0 if self.pinned else self.target - self.output


class ProfiledCost(StepCost):
    """The cost of steps by the profile, in place of the one that the engine learns while it runs."""

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
            share = self._engine.overlap
            fixed = self._engine.decode.fixed_s
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
    """A sequence as the engine's forecast of blocks sees it (:class:`baton.engine.scheduler.Growing`)."""

    pinned: bool
    num_output: int
    max_output: int
    num_tokens: int
    block_ids: range

    @property
    def all_blocks(self) -> range:
        return self.block_ids


LOAD_SHARE = 0.75
"""Share of the pool for sequences whose KV is being loaded (``--load-share``)."""
LOADS_PER_SEQUENCE = 4
"""Concurrent loads per slot of the batch (``--max-loads``)."""
_by_key = attrgetter("key")
Plan = list[tuple[SimulatedSequence, int]]
"""Prompts of a step, each with the tokens of it that are computed."""


class Owner(Protocol):
    """Callbacks of a simulated engine."""

    def needs_load(self, engine: SimulatedEngine, sequence: SimulatedSequence, matched: int) -> bool:
        """Whether the KV of a sequence with ``matched`` cached tokens is loaded from another instance."""

    def start_load(self, engine: SimulatedEngine, sequence: SimulatedSequence) -> None:
        """Start a load; :meth:`SimulatedEngine.load_ended` is called at its end."""

    def on_chunk_computed(
        self, engine: SimulatedEngine, sequence: SimulatedSequence, tokens: int, began: float
    ) -> None:
        """``tokens`` tokens of a pinned sequence were computed in a step from ``began`` until now."""

    def on_first_token(self, engine: SimulatedEngine, sequence: SimulatedSequence) -> None:
        """A sequence has its first token."""

    def on_finished(self, engine: SimulatedEngine, sequence: SimulatedSequence) -> None: ...


@dataclass(slots=True)
class EngineUse:
    """What an engine has done since the start.

    Attributes:
        prefill_s: Seconds of steps with prompts.
        decode_s: Seconds of steps with decodes alone.
        sequence_s: Decoding sequences, integrated over the seconds of steps.
        most_held: Highest number of used tokens of the pool.
        prompt_tokens: Prompt tokens computed.
        matched_tokens: Prompt tokens found in the prefix cache instead.
        preemptions: Number of preemptions.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    sequence_s: float = 0.0
    most_held: float = 0.0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class EngineExtras:
    """Optional properties of an instance.

    Attributes:
        on_change: Called after each change of the prefix cache.
        step_s: Seconds that each step takes beyond the profile.
        speculation: Speculative decoding.
        processors: Processors shared with other instances; ``None``: it has its own.
        block_tokens: Tokens of a block that prompts can share.
    """

    on_change: OnBlocksChanged = lambda stored, dropped: None
    step_s: float = 0.0
    speculation: Speculation = field(default_factory=Speculation)
    processors: Processors | None = None
    block_tokens: int = BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class _DecodeRun:
    """Consecutive steps of the same batch, simulated as one event: each is ``more_s`` seconds longer than the last."""

    began: float
    first_s: float
    more_s: float
    event: Event
    count: int

    def seconds(self, count: int) -> float:
        return _seconds(self.first_s, self.more_s, count)


def _seconds(first: float, more: float, count: int) -> float:
    return count * first + more * (count * (count - 1) // 2)


class SimulatedEngine:
    """One instance.

    Args:
        role: Prefill or decode.
        profile: Speeds, and the size of the KV pool.
        limits: Configured limits of a step.
        timeline: Virtual time.
        owner: Gets the callbacks.
        extras: Optional properties.

    Attributes:
        gaps: Per run of steps: seconds of a step, number of steps, and number of decoding sequences.
        cache: KV pool and prefix cache.
        use: Time and tokens used since the start.
    """

    def __init__(
        self,
        role: Role,
        profile: EngineProfile,
        limits: Limits,
        timeline: Timeline,
        owner: Owner,
        extras: EngineExtras,
    ) -> None:
        self.role = role
        self.profile = profile
        self.limits = limits
        self._timeline = timeline
        self._owner = owner
        self._step_s = extras.step_s
        self._processors = extras.processors
        self._emitted = extras.speculation.per_step
        self._queries = 1 + extras.speculation.tokens
        self._block_tokens = extras.block_tokens
        self.cache = PrefixCache(profile.kv_tokens, extras.on_change, extras.block_tokens)
        self._lengths = OutputLengths()
        self._budget: StepBudget | None = None
        if limits.step_budget_ms is not None and limits.step_budget_ms > 0:
            self._budget = StepBudget(limits.step_budget_ms / 1e3, ProfiledCost(profile))
        elif limits.step_budget_ms is None and role is Role.DECODE:
            self._budget = StepBudget(None, ProfiledCost(profile))
        self.waiting: list[SimulatedSequence] = []
        self.prefilling: list[SimulatedSequence] = []
        self.decoding: list[tuple[float, int, SimulatedSequence]] = []
        """A heap, by the step in which they end."""
        self._loading: set[SimulatedSequence] = set()
        self._came: list[SimulatedSequence] = []
        self._loaded: list[SimulatedSequence] = []
        self._context = self._steps = self._worst = 0.0
        self._run: _DecodeRun | None = None
        self._busy = False
        self.gaps: list[tuple[float, int, int]] = []
        self.use = EngineUse()

    # Called by the simulation

    def submit(self, sequence: SimulatedSequence) -> None:
        insort(self.waiting, sequence, key=_by_key)
        self._wake()

    def load_ended(self, sequence: SimulatedSequence) -> None:
        """Note that a sequence's KV was loaded, with its next token."""
        self._came.append(sequence)
        self._wake()

    def release(self, sequence: SimulatedSequence) -> None:
        """Give back the blocks of a pinned sequence, which were read."""
        self._release_blocks(sequence)
        if self.waiting:
            self._wake()

    def _wake(self) -> None:
        """Begin a step, or end the run of steps with the one that runs now."""
        if not self._busy:
            self._busy = True
            self._timeline.at(self._timeline.now, self._begin)
        elif (run := self._run) is not None:
            elapsed = self._timeline.now - run.began
            low = 1
            high = run.count
            while low < high:
                middle = (low + high) // 2
                if run.seconds(middle) >= elapsed:
                    high = middle
                else:
                    low = middle + 1
            if low < run.count:
                run.event.cancel()
                self._plan_run(run.began, run.first_s, run.more_s, low)

    # Steps

    def _begin(self) -> None:
        self._take_loaded()
        self._make_room()
        plan = self._plan_prompts() if self.prefilling or self.waiting else []
        batch = len(self.decoding)
        if not plan and not batch:
            self._busy = False
            return
        tokens = sum(count for _, count in plan)
        pairs = sum(count * (sequence.computed + 0.5 * count) for sequence, count in plan)
        seconds = self.profile.step_s(batch * self._queries, self._context, tokens, pairs) + self._step_s
        began = self._timeline.now
        if plan:
            self._start(seconds, lambda: self._end_mixed(plan, began))
        elif self._processors is not None:
            self._start(seconds, lambda: self._end_run(began, 1))
        else:
            grown = self._emitted * batch
            count = math.ceil(self.decoding[0][0] - self._steps - 1e-9)
            count = max(1, min(count, int(self.cache.free_tokens / grown)))
            self._plan_run(began, seconds, self.profile.decode.per_context_s * grown, count)

    def _start(self, seconds: float, done: Callable[[], None]) -> None:
        if self._processors is not None:
            self._processors.start(seconds, done)
        else:
            self._timeline.at(self._timeline.now + seconds, done)

    def _plan_run(self, began: float, first_s: float, more_s: float, count: int) -> None:
        event = self._timeline.at(began + _seconds(first_s, more_s, count), lambda: self._end_run(began, count))
        self._run = _DecodeRun(began, first_s, more_s, event, count)

    def _end_run(self, began: float, count: int) -> None:
        self._run = None
        self.use.decode_s += self._timeline.now - began
        self._decoded(began, count)
        self._begin()

    def _end_mixed(self, plan: Plan, began: float) -> None:
        self.use.prefill_s += self._timeline.now - began
        if self.decoding:
            self._decoded(began, 1)
        for sequence, count in plan:
            first = sequence.computed // self._block_tokens
            sequence.computed += count
            self.use.prompt_tokens += count
            self.cache.store(sequence.names[first : sequence.computed // self._block_tokens])
            if not sequence.missing:
                self.prefilling.remove(sequence)
                if not sequence.pinned:
                    self._generated(sequence)
            if sequence.pinned:
                self._owner.on_chunk_computed(self, sequence, count, began)
        self._begin()

    def _decoded(self, began: float, count: int) -> None:
        """Count steps of all that decodes, and let those end that have all their tokens."""
        now = self._timeline.now
        batch = len(self.decoding)
        self.gaps.append(((now - began) / count, count, batch))
        grown = count * self._emitted * batch
        self._steps += count
        self._context += grown
        self.cache.used_tokens += grown
        self.use.sequence_s += batch * (now - began)
        self.use.most_held = max(self.use.most_held, self.cache.used_tokens)
        self._worst -= grown
        while self.decoding and self.decoding[0][0] <= self._steps + 1e-9:
            _, _, sequence = heapq.heappop(self.decoding)
            self._end_decode(sequence)
            self._end(sequence)

    def _generated(self, sequence: SimulatedSequence) -> None:
        """A sequence has all of its prompt, and the token after it."""
        now = self._timeline.now
        sequence.output += 1
        sequence.private += 1
        self.cache.used_tokens += 1
        self._worst -= 1
        if math.isnan(sequence.first_at):
            sequence.first_at = now
            self._owner.on_first_token(self, sequence)
        else:  # it paused: this token is the first after that
            sequence.slices.append((0, 0, now - sequence.last_at))
        sequence.last_at = now
        if sequence.output >= sequence.target:
            self._end(sequence)
        else:
            insort(self._loaded, sequence, key=_by_key)

    @property
    def _num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def _begin_decode(self, sequence: SimulatedSequence) -> None:
        """Have a sequence decode from the next step on."""
        sequence.wait = self._timeline.now - sequence.last_at
        sequence.joined = self._steps
        sequence.slice_start = len(self.gaps)
        end = self._steps + math.ceil((sequence.target - sequence.output) / self._emitted - 1e-9)
        heapq.heappush(self.decoding, (end, sequence.key, sequence))
        self._context += sequence.base + sequence.output

    def _end_decode(self, sequence: SimulatedSequence) -> None:
        """Have a sequence decode no more, which is out of the heap."""
        grown = (self._steps - sequence.joined) * self._emitted
        sequence.output += grown
        sequence.private += grown
        self._context -= sequence.base + sequence.output
        sequence.last_at = self._timeline.now
        sequence.slices.append((sequence.slice_start, len(self.gaps), sequence.wait))

    def _end(self, sequence: SimulatedSequence) -> None:
        self._lengths.add(sequence.target)
        self._worst -= sequence.to_come
        self._release_blocks(sequence)
        self._owner.on_finished(self, sequence)

    def _release_blocks(self, sequence: SimulatedSequence) -> None:
        self.cache.release(sequence.names)
        self.cache.used_tokens -= sequence.private

    # Scheduling

    def _take_loaded(self) -> None:
        """Admit the sequences whose KV was loaded, as far as the batch has room."""
        came = self._came
        self._came = []
        for sequence in came:
            self._loading.discard(sequence)
            sequence.computed = sequence.prompt
            self.cache.store(sequence.names)
            self._generated(sequence)
        while self._loaded and self._num_running < self.limits.max_num_seqs:
            self._begin_decode(self._loaded.pop(0))

    def _make_room(self) -> None:
        """Preempt the last until all that decodes can grow by a step."""
        while self.decoding and self.cache.free_tokens < self._emitted * len(self.decoding):
            others = [sequence for _, _, sequence in self.decoding] + self._loaded
            others += [sequence for sequence in self.prefilling if not sequence.pinned]
            if len(others) == 1:
                return
            self._preempt(max(others, key=_by_key))

    def _preempt(self, sequence: SimulatedSequence) -> None:
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        elif sequence in self._loaded:
            self._loaded.remove(sequence)
        else:
            self.decoding = [each for each in self.decoding if each[2] is not sequence]
            heapq.heapify(self.decoding)
            self._end_decode(sequence)
        self._worst -= sequence.to_come
        self._release_blocks(sequence)
        sequence.prompt = sequence.base + int(sequence.output)
        sequence.computed = 0
        sequence.private = 0.0
        sequence.num_preemptions += 1
        self.use.preemptions += 1
        insort(self.waiting, sequence, key=_by_key)

    def _plan_prompts(self) -> Plan:
        """Choose the prompts' part of a step: those that have begun, then those that wait."""
        room: PrefillRoom | None = None
        if self._budget is not None:
            work = StepWork(rows=len(self.decoding) * self._queries, decode_context=int(self._context))
            room = self._budget.prefill_room(work, self.limits.block_size)
        plan: Plan = []
        budget = self.limits.max_num_batched_tokens - len(self.decoding) * self._queries
        for sequence in self.prefilling:
            budget -= self._plan_chunk(plan, sequence, budget, room)
        if self.waiting:
            self._admit_waiting(plan, budget, room)
        return plan

    def _plan_chunk(self, plan: Plan, sequence: SimulatedSequence, budget: int, room: PrefillRoom | None) -> int:
        count = max(0, min(sequence.missing, self.limits.prefill_chunk, budget))
        if room is not None and count:
            count = room.fit(count, sequence.computed)
            room.reserve(count, sequence.computed)
        if count:
            plan.append((sequence, count))
        return count

    def _admit_waiting(self, plan: Plan, budget: int, room: PrefillRoom | None) -> None:
        """Let sequences begin in their order; while the first one is too big, some that are smaller."""
        too_big: SimulatedSequence | None = None
        left = LOOKAHEAD
        for sequence in list(itertools.islice(self.waiting, self.limits.max_num_batched_tokens)):
            matched = self._matched(sequence)
            loads = self._owner.needs_load(self, sequence, matched)
            full = budget <= 0 or (room is not None and room.full)
            if self._num_running >= self.limits.max_num_seqs or (full and not loads):
                return
            if loads and not self._may_load(sequence):
                continue
            if not loads and self._prefix_is_computed(sequence, matched):
                continue
            if not self._fits(sequence):
                too_big = too_big or sequence
                if too_big.num_preemptions or not left:
                    return
                left -= 1
                continue
            if too_big is not None:
                too_big.num_passed += 1
            self._admit(sequence, matched, loads=loads)
            if not loads:
                budget -= self._plan_chunk(plan, sequence, budget, room)
            if too_big is not None and too_big.num_passed >= PASSES:
                return

    def _admit(self, sequence: SimulatedSequence, matched: int, *, loads: bool) -> None:
        self.waiting.remove(sequence)
        sequence.private = self._private(sequence)
        self.cache.acquire(sequence.names)
        self.cache.used_tokens += sequence.private
        self.use.most_held = max(self.use.most_held, self.cache.used_tokens)
        self._worst += sequence.to_come
        if math.isnan(sequence.admitted_at):
            sequence.admitted_at = self._timeline.now
            sequence.matched = matched
        if loads:
            self._loading.add(sequence)
            self._owner.start_load(self, sequence)
            return
        sequence.computed = max(sequence.computed, matched)
        self.use.matched_tokens += sequence.computed
        self.cache.store(sequence.names[: sequence.computed // self._block_tokens])
        insort(self.prefilling, sequence, key=_by_key)

    def _matched(self, sequence: SimulatedSequence) -> int:
        """Return the number of leading cached tokens; the last one is always computed, for its logits."""
        matched = self._block_tokens * self.cache.match_prefix(sequence.names)
        return matched if matched < sequence.prompt else matched - self._block_tokens

    def _prefix_is_computed(self, sequence: SimulatedSequence, matched: int) -> bool:
        """Whether a prompt that has begun computes the block that a waiting one lacks next."""
        at = matched // self._block_tokens
        if at >= len(sequence.names) or matched + self._block_tokens >= sequence.prompt:
            return False
        name = sequence.names[at]
        return any(
            at < len(other.names) and other.names[at] == name and other.computed // self._block_tokens <= at
            for other in self.prefilling
        )

    def _private(self, sequence: SimulatedSequence) -> float:
        """Return the tokens of the pool that a sequence takes beside its prompt's full blocks."""
        return sequence.prompt - self._block_tokens * len(sequence.names) + 0.5 * self.limits.block_size

    def _may_load(self, sequence: SimulatedSequence) -> bool:
        """Whether another sequence may hold blocks while its KV is on its way."""
        if not self._loading:
            return True
        tokens = sum(self._block_tokens * len(each.names) + each.private for each in self._loading) + sequence.prompt
        most = LOADS_PER_SEQUENCE * self.limits.max_num_seqs
        return len(self._loading) < most and tokens <= LOAD_SHARE * self.cache.capacity

    def _fits(self, sequence: SimulatedSequence) -> bool:
        """Whether a sequence can begin without a preemption, as far as can be predicted."""
        need = self._private(sequence) + self.cache.unused_tokens(sequence.names)
        free = self.cache.free_tokens
        if need > free:
            return False
        if sequence.pinned or need + max(0.0, self._worst) + sequence.to_come <= free:
            return True
        forecast = BlockForecast(self._lengths, self.limits.block_size)
        running = [(each, each.output + (self._steps - each.joined) * self._emitted) for _, _, each in self.decoding]
        for each in (*self.prefilling, *self._loaded, *self._loading):
            running.append((each, each.output))
        for each, output in running:
            forecast.add(self._growing(each, output))
        size = self.limits.block_size
        shared = max(0, int((sequence.prompt - need) // size))
        return forecast.fits(self._growing(sequence, sequence.output), shared, int(free // size))

    def _growing(self, sequence: SimulatedSequence, output: float) -> GrowingSequence:
        tokens = max(sequence.prompt, sequence.base + int(output))
        blocks = range(-(-tokens // self.limits.block_size))
        return GrowingSequence(sequence.pinned, int(output), sequence.target, tokens, blocks)
