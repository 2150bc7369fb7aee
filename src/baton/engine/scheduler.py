"""Which tokens are computed next.

Every step goes through three stages under one budget of tokens: running sequences that decode, running sequences that
prefill (in chunks), admission from the queue. Beside decodes, prompts are cut down to what a budget in time allows
(:mod:`baton.engine.step_budget`). Why it always makes progress:

* There are never more running sequences than tokens in the budget, so all decodes run in every step and the first
  prefilling sequence gets at least one token (as much as a block of them whatever the budget in time says).
* What loads is not running: it takes no slot of the batch, so a source that hangs holds up those alone that load from
  it. Loads are bounded by a number and a share of the blocks of their own; what may not load yet lets pass what loads
  nothing. A sequence whose load has ended while the batch is full keeps its blocks and gets the next slot.
* At admission a sequence gets blocks for all its tokens at once. So a prefill never waits for blocks, two half-done
  prompts can't block each other, and only decodes grow.
* A decode that can't grow preempts the last running sequence by sort key (perhaps itself). The first one can
  only be preempted by itself, when everything else that holds blocks is pinned, loading or held for others, each of
  which ends by itself; and alone every sequence fits, which is checked before it is queued.
* Admission leaves the blocks that the outputs of those that run are expected to need (:class:`BlockForecast`), so that
  a stream that has begun does not pause. If it errs, preemption helps.
* A big request at the queue's head lets smaller ones pass while there is no room for it, :data:`PASSES` times; then it
  is not overtaken any more, so it is not starved. What has begun to answer is never overtaken.
* A prompt waits while a running prompt has yet to compute :data:`LEAST_AWAITED` tokens that both share, rather than
  compute them a second time, and others pass it meanwhile. It waits for what runs and is no less important, so what it
  waits for makes progress.
* Under the policy ``priority`` a request preempts what is less important, for a slot of the batch or for blocks.
* *Background* requests (:data:`~baton.types.BACKGROUND_PRIORITY`) come last under every policy, may be preempted by all
  others, and get nothing in steps that compute another request's prompt. Beside decodes they may add a little to a
  step's time, and steps of their own are short, because a request that arrives meanwhile waits for the end. They only
  pause while others make progress: what holds blocks and cannot be preempted goes on as soon as nothing else can.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

import numpy as np

from baton.config import EngineConfig
from baton.engine.connector_bridge import ConnectorBridge
from baton.engine.sequence import PrefixHit, Sequence, SequenceState, SortKey, WindowGroups
from baton.engine.step_budget import PrefillRoom, StepBudget, StepWork
from baton.errors import InternalError
from baton.hashing import state_hashes
from baton.kv_cache.block_pool import STATES, BlockPool
from baton.types import BACKGROUND_PRIORITY, BlockHash, BlockId, FinishReason


class WaitingQueue:
    """A priority queue by sort key (priority, arrival, index).

    A preempted sequence keeps its key, so it comes back before everything that arrived after it.
    """

    def __init__(self) -> None:
        self._keys: list[SortKey] = []
        self._live: dict[SortKey, Sequence] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.key in self._live

    def __iter__(self) -> Iterator[Sequence]:
        # A copy, made in one bytecode: statistics are read from other threads.
        return iter(tuple(self._live.values()))

    def in_order(self) -> Iterator[Sequence]:
        """Walk over the sequences that are there now, first ones first; what is removed meanwhile is left out."""
        for key in self._keys.copy():
            if (sequence := self._live.get(key)) is not None:
                yield sequence

    @property
    def last_key(self) -> SortKey:
        """Sort key of the last sequence; if there is none, one before all others."""
        return self._keys[-1] if self._keys else _FIRST_KEY

    def push(self, sequence: Sequence) -> None:
        self._live[sequence.key] = sequence
        insort(self._keys, sequence.key)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is there."""
        if self._live.pop(sequence.key, None) is not None:
            del self._keys[bisect_left(self._keys, sequence.key)]


OUTPUTS_KEPT = 256
"""Number of recent outputs whose lengths are kept."""
MIN_OUTPUTS = 8
"""Outputs needed before their lengths are used for a forecast."""
LENGTH_QUANTILE = 0.5
"""Quantile of the outputs longer than a sequence's own that it is expected to reach."""
UNKNOWN_LENGTH = 64
"""Output tokens expected of a request with a larger ``max_tokens`` before there is anything to go by."""


class OutputLengths:
    """Lengths of the latest outputs, in tokens."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        """Add the length of a finished output."""
        if len(self._latest) == OUTPUTS_KEPT:
            self._sorted.remove(self._latest.popleft())
        self._latest.append(length)
        insort(self._sorted, length)

    def expected(self, done: int, limit: int) -> int:
        """Return the expected final length of an output, in tokens.

        Args:
            done: Tokens generated so far.
            limit: Most tokens that it may have.
        """
        known = self._sorted
        first = bisect_right(known, done)
        if len(known) >= MIN_OUTPUTS and first < len(known):
            return min(limit, known[first + int(LENGTH_QUANTILE * (len(known) - 1 - first))])
        return min(limit, max(2 * done, UNKNOWN_LENGTH if len(known) < MIN_OUTPUTS else 0, done + 1))


class Growing(Protocol):
    """Properties of a sequence that a forecast reads (:class:`~baton.engine.sequence.Sequence` is one)."""

    @property
    def pinned(self) -> bool:
        """Whether it keeps its blocks for other instances when it ends."""

    @property
    def num_output(self) -> int:
        """Number of output tokens generated so far."""

    @property
    def max_output(self) -> int:
        """Number of output tokens at most."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens."""

    @property
    def block_ids(self) -> Sized:
        """Blocks of its first layer group."""

    @property
    def all_blocks(self) -> Sized:
        """Blocks of all layer groups."""


class BlockForecast:
    """The blocks that running sequences will need until all of them have ended.

    A sequence admitted while the outputs of others still grow may leave too few blocks for them; one of those is then
    preempted and its stream pauses. So admission looks ahead (as "Past-Future Scheduler", Gong et al., ASPLOS 2025):
    with the expected output lengths, at no end of a sequence may the remaining ones need more blocks than there are.

    Args:
        lengths: Lengths of recent outputs.
        block_size: Tokens per block.
        groups: Number of layer groups that have blocks of their own. Blocks are counted in blocks of all layers.
    """

    def __init__(self, lengths: OutputLengths, block_size: int, groups: int = 1) -> None:
        self._lengths = lengths
        self._block_size = block_size
        self._groups = groups
        self._needs: list[tuple[int, int, int]] = []

    def add(self, sequence: Growing) -> None:
        """Add a sequence that has its blocks; pinned ones neither grow nor release blocks."""
        if not sequence.pinned:
            held = len(sequence.block_ids)
            given_back = held + -len(sequence.all_blocks) // self._groups if self._groups > 1 else 0
            to_come, tokens, _ = self._need(sequence, held)
            self._needs.append((to_come, tokens - given_back * self._block_size, held - given_back))

    def fits(self, sequence: Growing, held: int, free: int) -> bool:
        """Whether a sequence can start beside the others without a later preemption.

        A sequence alone always fits: that was checked when its request was added.

        Args:
            sequence: Sequence without blocks.
            held: Number of its blocks found in the prefix cache.
            free: Number of other blocks that may be allocated.
        """
        size = self._block_size
        if -(-sequence.num_tokens // size) - held > free:
            return False
        if not self._needs:
            return True
        needs = self._needs if sequence.pinned else [*self._needs, self._need(sequence, held)]
        if sequence.pinned:
            free -= -(-sequence.num_tokens // size) - held
        remaining, tokens, blocks = np.array(sorted(needs, reverse=True)).T
        # When the k-th from the longest on ends, k of them have grown by its remaining tokens, the others have ended.
        count = np.arange(1, len(needs) + 1)
        most = (tokens.cumsum() + count * (remaining + size - 1)) // size
        return bool((most - blocks.sum()).max() <= free)

    def _need(self, sequence: Growing, held: int) -> tuple[int, int, int]:
        """Return the output tokens to come, the tokens that are there, and the blocks held of them."""
        done = sequence.num_output
        to_come = self._lengths.expected(done, sequence.max_output) - done
        return max(1, to_come), sequence.num_tokens, held


PASSES = 16
"""Most sequences that may overtake one that waits at the queue's head because it is too big."""
LOOKAHEAD = 8
"""Sequences behind it that are tried in one step."""
LEAST_AWAITED = 128
"""Tokens that are worth waiting for: fewer are computed again sooner, as waiting takes a step."""

MOST_QUERIES = 32
"""Tokens that a decoding sequence may compute in a step."""
PROMPT_LOGPROB_ROWS = 64
"""Prompt tokens of a step whose log probabilities are computed: each takes a row of logits."""

_FIRST_KEY: SortKey = (-(2**31), -1, -1)
"""Sort key before all sequences."""
_by_key = attrgetter("key")
BACKGROUND: SortKey = (BACKGROUND_PRIORITY, -1, -1)
"""Sort key before those of all background sequences, and behind all others."""
BACKGROUND_PART = 8
"""A step has at most this part of its budget of tokens for background sequences' prompts: 1/8."""
BACKGROUND_PROMPT_SHARE = 0.05
"""The same limit without a budget in time, as a share of the tokens of others' prompts: one that arrives waits for the
end of the step, and each step also takes what a step of one token takes."""
PROMPTS_LATELY_S = 60.0
"""Seconds after which another prompt no longer limits background sequences."""
_PROMPT_WEIGHT = 0.1
"""Weight of the last prompt in the mean length of prompts."""
_MAY_ROLL_BACK = {SequenceState.WAITING, SequenceState.LOADED, SequenceState.RUNNING}


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A copy between a slot of recurrent states and blocks of the pool.

    Attributes:
        slot: The slot.
        block_ids: The blocks, which hold one snapshot together.
        num_tokens: Number of a sequence's tokens after which these are its states.
    """

    slot: int
    block_ids: tuple[BlockId, ...]
    num_tokens: int


@dataclass(slots=True)
class StepPlan:
    """The sequences of a step, decodes first.

    A decoding sequence has one query token as a rule; it has more while it catches up (after a roll-back, or with the
    tokens that its grammar forced), or with draft tokens: proposals for the tokens that follow its own, of which the
    step computes KV and logits so that they can be verified. Draft tokens come after all of a sequence's own tokens;
    their KV is not counted as computed until they are accepted.

    Attributes:
        counts: Per sequence, how many of its own tokens are computed, from ``num_computed`` on.
        drafts: Draft tokens per sequence, of those that have some; the sequence's own tokens are all computed then.
        trees: Of those drafts that are trees, the index of each token's parent, which comes before it, -1: the
            sequence's last token. Other drafts are chains.
        num_scored: Prompt tokens at most whose log probabilities are computed.
        work: What the step computes, for the estimate of its time; ``None``: not estimated.
        has_prompts: Whether a part of a prompt is computed, of a request that is no background one.
        num_prompts_ended: Prompts of such requests that are computed to their end.
        state_loads: Snapshots that slots of recurrent states get before the step.
        state_saves: Snapshots that are taken after it, each with its sequence.
        state_blocks: Blocks of these snapshots, one reference each, released when the step has been read.
    """

    counts: dict[Sequence, int] = field(default_factory=dict)
    drafts: dict[Sequence, tuple[int, ...]] = field(default_factory=dict)
    trees: dict[Sequence, tuple[int, ...]] = field(default_factory=dict)
    num_scored: int = 0
    work: StepWork | None = None
    has_prompts: bool = False
    num_prompts_ended: int = 0
    state_loads: list[StateCopy] = field(default_factory=list)
    state_saves: list[tuple[Sequence, StateCopy]] = field(default_factory=list)
    state_blocks: list[BlockId] = field(default_factory=list)

    def __len__(self) -> int:
        """Number of sequences in the step."""
        return len(self.counts)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step, draft tokens included."""
        return sum(self.counts.values()) + sum(map(len, self.drafts.values()))


def work_of_decodes(plan: StepPlan) -> StepWork:
    """Return the work of a plan that has decodes alone."""
    work = StepWork(rows=len(plan), decode_context=sum(sequence.num_tokens for sequence in plan.counts))
    for sequence, count in plan.counts.items():
        if count > 1:
            work.add_prompt(sequence.num_launched, count - 1)
    return work


class Scheduler:
    """Owns the queue, the running sequences and their blocks.

    Attributes:
        waiting: Sequences waiting for admission.
        waiting_to_load: Sequences that will load KV from outside, and wait for other loads.
        loaded: Sequences whose load has finished while the batch was full, by sort key; they hold their blocks.
        running: Sequences in the batch, by sort key; they hold their blocks.
        step_budget: Time limit of steps; ``None``: no limit.
        num_preemptions: Preemptions since start.
        prefix_query_tokens: Tokens looked up in the prefix cache at first admissions, since start.
        prefix_hit_tokens: Tokens of these that were found.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        bridge: ConnectorBridge,
        groups: WindowGroups | None = None,
        *,
        state_blocks: int = 0,
    ) -> None:
        self._pool = pool
        self._groups = groups or WindowGroups((), 0, config.block_size)
        self._bridge = bridge
        self._block_size = config.block_size
        self._budget = config.max_num_batched_tokens
        self._chunk = config.prefill_chunk
        self._max_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._caching = config.prefix_caching
        self._state_every = config.state_every
        self._num_state_blocks = state_blocks
        # A heap: sequences that arrive one after the other get neighbours, whose states need not be copied together.
        self._free_slots = list(range(self._max_seqs)) if state_blocks else None
        self._preempts = config.policy == "priority"
        self._max_loads = 4 * config.max_num_seqs if config.max_loads is None else config.max_loads
        self._max_load_blocks = int(config.load_share * pool.num_blocks)
        self.waiting = WaitingQueue()
        self.waiting_to_load = WaitingQueue()
        self.loaded: list[Sequence] = []
        self.running: list[Sequence] = []
        self.output_lengths = OutputLengths()
        self.step_budget: StepBudget | None = None
        self._mean_prompt = 0.0
        """Tokens that prompts of others than background requests had to have computed, in the mean."""
        self._prompt_at = -math.inf
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    def schedule(self) -> StepPlan:
        """Choose the tokens of the next step; reserves their blocks, admits and preempts sequences."""
        plan = self._plan_tokens()
        if self._num_state_blocks:
            self._plan_states(plan)
        return plan

    def _plan_tokens(self) -> StepPlan:
        plan = StepPlan()
        while self.loaded and len(self.running) < self._max_seqs:
            self._start_running(self.loaded.pop(0))
        first = bisect_left(self.running, BACKGROUND, key=_by_key)
        self._plan_others(plan, self.running[:first])
        if not plan.has_prompts and self._has_background():
            # What is running may have changed: a sequence that was admitted, and those that it preempted.
            self._plan_background(plan, [x for x in self.running if x.key > BACKGROUND])
        return plan

    def _plan_states(self, plan: StepPlan) -> None:
        """Add the copies of recurrent states that a plan's tokens need, or that later requests may use."""
        for sequence, count in plan.counts.items():
            if blocks := sequence.pop_snapshot():
                plan.state_loads.append(StateCopy(sequence.state_slot, tuple(blocks), sequence.num_launched))
                plan.state_blocks += blocks
            end = sequence.num_launched + count
            if sequence.pinned and end == sequence.num_tokens:
                self._plan_save(plan, sequence, sequence.state_blocks, end)
            if self._caching and end == self._next_snapshot(sequence):
                name = sequence.hash_blocks(end, self._block_size)[-1]
                if self._pool.find([name], STATES) == [None]:
                    blocks = self._pool.allocate(self._num_state_blocks) or []
                    plan.state_blocks += blocks
                    self._plan_save(plan, sequence, blocks, end)

    def _plan_save(self, plan: StepPlan, sequence: Sequence, blocks: list[BlockId], num_tokens: int) -> None:
        if blocks:
            plan.state_saves.append((sequence, StateCopy(sequence.state_slot, tuple(blocks), num_tokens)))

    def _next_snapshot(self, sequence: Sequence) -> int:
        """Return the number of tokens after which the next snapshot of a sequence's states is taken.

        That is every ``state_every`` tokens, where the last full block before the end of a prompt ends, which the next
        turn of its conversation begins with, and where it parts from an earlier prompt: a third one may part there too.
        """
        size = self._block_size
        every = max(1, self._state_every // size) * size
        done = sequence.num_launched
        points = (done // every + 1) * every, (sequence.num_prompt - 1) // size * size, sequence.branch
        return min(point for point in points if point > done)

    def commit_states(self, plan: StepPlan) -> None:
        """Register the snapshots of a step that was read in the prefix cache, and release their blocks."""
        for sequence, copy in plan.state_saves:
            blocks = list(copy.block_ids)
            if blocks == sequence.state_blocks or sequence.num_computed < copy.num_tokens:
                continue  # they are for a reader, or of a sequence that ended in error or was preempted
            name = sequence.hash_blocks(copy.num_tokens, self._block_size)[-1]
            request = sequence.group.request
            tenant, session = request.tenant_id, request.session_key
            for block, block_hash in zip(blocks, state_hashes(name, len(blocks)), strict=True):
                self._pool.commit(block, block_hash, None, tenant=tenant, session=session, group=STATES)

    def release_states(self, plan: StepPlan) -> None:
        """Release the blocks of a step's snapshots, once."""
        self._pool.release(plan.state_blocks)
        plan.state_blocks = []

    def _has_background(self) -> bool:
        """Whether there are background sequences that wait or run."""
        return bool(self.running and self.running[-1].key > BACKGROUND) or any(
            queue.last_key > BACKGROUND for queue in (self.waiting, self.waiting_to_load)
        )

    def _plan_others(self, plan: StepPlan, running: list[Sequence]) -> None:
        """Add the running sequences that are no background sequences to a plan, and admit such ones."""
        preemptions = self.num_preemptions
        budget = self._plan_decodes(plan, running, self._budget)
        if self.step_budget is not None:
            plan.work = work_of_decodes(plan)
        if len(plan) == len(running) and not (self.waiting or self.waiting_to_load):
            return
        room = self._prefill_room(plan)
        budget = self._plan_prefills(plan, running, budget, room)
        if self.num_preemptions == preemptions:
            self._admit_waiting(plan, budget, room, background=False)

    def _plan_background(self, plan: StepPlan, running: list[Sequence]) -> None:
        """Add background sequences to a plan that has the decodes of all others, as far as these allow it."""
        preemptions = self.num_preemptions
        seconds = math.inf
        alone = not plan.counts
        fitting = running
        if self.step_budget is not None and plan.work is not None:
            seconds = self.step_budget.background_seconds(plan.work)
            fitting = []
            for sequence in running:
                if self._decode_tokens(sequence, 0):
                    seconds -= self.step_budget.cost.decode_seconds(sequence.num_tokens)
                    if seconds < 0 and not (alone and not fitting):
                        break
                    fitting.append(sequence)
        budget = self._plan_decodes(plan, fitting, self._budget - plan.num_tokens)
        budget = min(budget, self._background_tokens())
        room = None
        if self.step_budget is not None:
            plan.work = work_of_decodes(plan)
            least = self._block_size if alone else 0
            room = self.step_budget.background_room(plan.work, max(0.0, seconds), least)
        prefilling = [x for x in running if not self._decode_tokens(x, 0)]
        budget = self._plan_prefills(plan, prefilling, budget, room)
        if self.num_preemptions == preemptions:
            self._admit_waiting(plan, budget, room, background=True)

    def _background_tokens(self) -> int:
        """Return how many prompt tokens of background sequences a step may compute."""
        tokens = self._budget // BACKGROUND_PART
        if self.step_budget is None and time.monotonic() - self._prompt_at < PROMPTS_LATELY_S:
            tokens = min(tokens, int(BACKGROUND_PROMPT_SHARE * self._mean_prompt))
        return max(self._block_size, tokens)

    def schedule_ahead(self) -> StepPlan:
        """Choose the tokens of the step after a launched one, as if all its expected tokens had been sampled.

        No sequence is preempted for it: preemption waits until all tokens are known.

        Returns:
            The plan; an empty one if there is nothing to compute, or it has to wait.
        """
        size = self._block_size
        missing = 0
        for sequence in itertools.chain(self.running, self.loaded):
            missing += max(0, -(-(sequence.num_tokens + sequence.num_expected) // size) - len(sequence.block_ids))
        if missing * self._groups.count > self._pool.num_free or (
            self.num_waiting and (self._preempts or self._has_background())
        ):
            return StepPlan()
        return self.schedule()

    def _plan_decodes(self, plan: StepPlan, running: list[Sequence], budget: int) -> int:
        more = budget - len(self.running)  # each gets one token first
        for sequence in running:
            count = min(budget, self._decode_tokens(sequence, more))
            if count and self._make_room(sequence, sequence.num_launched + count, plan):
                plan.counts[sequence] = count
                budget -= count
                more -= count - 1
        return budget

    def _decode_tokens(self, sequence: Sequence, more: int) -> int:
        """Return how many tokens a decoding sequence computes in a step, at most ``more`` beside one; 0: it prefills.

        As a rule one; more after tokens that were not sampled, but for so many that they are computed like a prompt.
        """
        missing = sequence.num_missing
        if missing == 1 or (missing <= MOST_QUERIES and sequence.num_launched >= sequence.num_prompt):
            return min(missing, 1 + max(0, more), self._chunk)
        return 0

    def _prefill_room(self, plan: StepPlan) -> PrefillRoom | None:
        """Return what the budget in time leaves for prompts beside a plan's decodes; ``None``: there is none."""
        if self.step_budget is None or plan.work is None:
            return None
        return self.step_budget.prefill_room(plan.work, self._block_size)

    def _plan_prefills(self, plan: StepPlan, running: list[Sequence], budget: int, room: PrefillRoom | None) -> int:
        for sequence in [other for other in running if other not in plan.counts]:
            count = self._chunk_size(plan, sequence, budget, room)
            if count and self._make_room(sequence, sequence.num_launched + count, plan):
                budget -= self._plan_chunk(plan, sequence, count, room)
        return budget

    def _chunk_size(self, plan: StepPlan, sequence: Sequence, budget: int, room: PrefillRoom | None) -> int:
        """Return how many tokens of a prefilling sequence fit into a step."""
        count = min(sequence.num_missing, self._chunk, budget)
        if self._num_state_blocks and self._caching:
            count = min(count, self._next_snapshot(sequence) - sequence.num_launched)
        if sequence.wants_prompt_logprobs:
            count = min(count, PROMPT_LOGPROB_ROWS - plan.num_scored)
        return count if room is None else room.fit(count, sequence.num_launched)

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence, count: int, room: PrefillRoom | None) -> int:
        plan.counts[sequence] = count
        if sequence.key < BACKGROUND:
            plan.has_prompts = True
            plan.num_prompts_ended += count == sequence.num_missing
        if sequence.wants_prompt_logprobs:
            plan.num_scored += count
            if plan.work is not None:
                plan.work.rows += count
        if room is not None:
            room.reserve(count, sequence.num_launched)
        return count

    @property
    def num_waiting(self) -> int:
        """Sequences that have no blocks yet, or no slot of the batch."""
        return len(self.waiting) + len(self.waiting_to_load) + len(self.loaded)

    def all_waiting(self) -> Iterator[Sequence]:
        """Return the sequences of :attr:`num_waiting`; other threads may walk over them."""
        return itertools.chain(self.waiting, self.waiting_to_load, tuple(self.loaded))

    def _admit_waiting(self, plan: StepPlan, budget: int, room: PrefillRoom | None, *, background: bool) -> None:
        """Admit waiting sequences in order; while the first one is too big, try some smaller ones behind it.

        No background sequence passes another one that waits for blocks or a slot.
        """
        too_big: Sequence | None = None
        left = LOOKAHEAD
        forecast = self._block_forecast()
        for sequence in heapq.merge(self.waiting.in_order(), self.waiting_to_load.in_order(), key=_by_key):
            if (sequence.key > BACKGROUND) != background and (not background or sequence in self.waiting):
                return
            # What may come from outside costs this step nothing.
            if not budget or (room is not None and room.full and not self._bridge.may_load(sequence)):
                return
            if sequence.awaits_prefix and self._prefix_is_computed(sequence):
                continue
            if len(self.running) >= self._max_seqs:
                if not (victims := self._preemption_victims(sequence)):
                    return
                self._preempt_for(victims[:1], plan)
                forecast = self._block_forecast()
            admitted = self._admit(sequence, forecast)
            if admitted is False and too_big is None and self._preempt_for_blocks(sequence, plan):
                forecast = self._block_forecast()
                admitted = self._admit(sequence, forecast)
            if admitted is None:
                continue
            if admitted is False:
                too_big = too_big or sequence
                if too_big.started or not left:
                    return
                left -= 1
                continue
            if too_big is not None:
                too_big.num_passed += 1
            forecast.add(sequence)
            if sequence.state is SequenceState.RUNNING and (count := self._chunk_size(plan, sequence, budget, room)):
                budget -= self._plan_chunk(plan, sequence, count, room)
            if too_big is not None and too_big.num_passed >= PASSES:
                return

    def _block_forecast(self) -> BlockForecast:
        forecast = BlockForecast(self.output_lengths, self._block_size, self._groups.count)
        for sequence in itertools.chain(self.running, self.loaded, self._bridge.loading.values()):
            forecast.add(sequence)
        return forecast

    def _preemption_victims(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences of lower priority that may be preempted for one, the least important first."""
        priority = sequence.group.priority
        others = (other for other in itertools.chain(self.running, self.loaded) if not other.pinned)
        return sorted((other for other in others if other.group.priority > priority), key=_by_key, reverse=True)

    def _preempt_for(self, victims: Iterable[Sequence], plan: StepPlan) -> None:
        for victim in victims:
            self._preempt(victim)
            plan.counts.pop(victim, None)

    def _preempt_for_blocks(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Preempt as many less important sequences as one needs to start; ``False``: they hold too few blocks."""
        need = -(-sequence.num_tokens // self._block_size) * self._groups.count - self._pool.num_free
        victims = self._preemption_victims(sequence)
        blocks = list(itertools.accumulate(len(victim.all_blocks) for victim in victims))
        if not blocks or blocks[-1] < need:
            return False
        count = next(i for i, freed in enumerate(blocks, 1) if freed >= need)
        self._preempt_for(victims[:count], plan)
        return True

    def _admit(self, sequence: Sequence, forecast: BlockForecast) -> bool | None:
        """Allocate a sequence's blocks and start it or its load.

        Returns:
            Whether it was admitted; ``None``: its load has to wait for other loads, or it for blocks of its prefix.
        """
        prefix = self._find_prefix(sequence)
        need = (-(-sequence.num_tokens // self._block_size) - len(prefix.block_ids)) * self._groups.count
        may_load = self._may_start_load(need)
        if not may_load and sequence in self.waiting_to_load:
            return None
        states = self._num_state_blocks if sequence.pinned or self._bridge.may_load(sequence) else 0
        free = self._pool.num_free_without(prefix.all_blocks) // self._groups.count - states
        if not forecast.fits(sequence, len(prefix.block_ids), free):
            return False
        num_local = len(prefix.block_ids) * self._block_size
        load = self._bridge.plan_load(sequence, num_local)
        loads = load is not None and load.num_tokens > num_local
        sequence.awaits_prefix = not loads and self._prefix_is_computed(sequence)
        if sequence.awaits_prefix:
            return None
        self._dequeue(sequence)
        if loads and not may_load:
            self.waiting_to_load.push(sequence)
            return None
        if not sequence.group.admitted_ns:
            request = sequence.group.request
            self._pool.begin_turn(prefix.all_blocks, request.tenant_id, request.session_key, request.retention_s)
        self._pool.acquire(prefix.all_blocks)
        sequence.attach_prefix(prefix, self._groups.new_tables(), self._block_size)
        sequence.append_blocks(self._pool.allocate(need) or ())
        if sequence.pinned or loads:
            sequence.state_blocks = self._pool.allocate(states) or []
        if not sequence.admitted:
            sequence.admitted = True
            sequence.group.admitted_ns = sequence.group.admitted_ns or time.monotonic_ns()
            sequence.num_cached = num_local
            self.prefix_hit_tokens += num_local
            self.prefix_query_tokens += sequence.num_tokens if self._caching else 0
            if sequence.key < BACKGROUND:
                missing = sequence.num_tokens - num_local
                self._mean_prompt += (_PROMPT_WEIGHT if self._mean_prompt else 1.0) * (missing - self._mean_prompt)
                self._prompt_at = time.monotonic()
        if sequence.pinned:
            self._bridge.save_computed(sequence)
        if loads and self._bridge.start_load(sequence, num_local):
            sequence.state = SequenceState.LOADING
        else:
            self._start_running(sequence)
        return True

    def _may_start_load(self, need: int) -> bool:
        """Whether another load may hold so many blocks; one alone always may."""
        loading = self._bridge.loading
        held = sum(len(other.all_blocks) for other in loading.values())
        return not loading or (len(loading) < self._max_loads and held + need <= self._max_load_blocks)

    def _find_prefix(self, sequence: Sequence) -> PrefixHit:
        """Return cached blocks of a sequence, at most all but its last token: logits come from computing one."""
        hashes = self._prefix_hashes(sequence)
        hit = self._groups.match(self._pool, hashes)
        sequence.branch = len(hit.block_ids) * self._block_size
        return self._with_snapshot(hit, hashes) if self._num_state_blocks else hit

    def _with_snapshot(self, hit: PrefixHit, hashes: SequenceOf[BlockHash]) -> PrefixHit:
        """Return the longest part of a cached prefix after which there is a snapshot of the recurrent states."""
        for length in range(len(hit.block_ids), 0, -1):
            if self._pool.find(hashes[length - 1 : length], STATES) == [None]:
                continue
            found = self._pool.find(state_hashes(hashes[length - 1], self._num_state_blocks), STATES)
            snapshot = [block for block in found if block is not None]
            if len(snapshot) == len(found):
                return PrefixHit(hit.block_ids[:length], [], snapshot)
        return PrefixHit([], [])

    def _prefix_hashes(self, sequence: Sequence) -> list[BlockHash]:
        """Return the hashes of the blocks that a sequence may take from the prefix cache."""
        caching = self._caching and not sequence.wants_prompt_logprobs
        return sequence.hash_blocks(sequence.num_tokens - 1, self._block_size) if caching else []

    def _prefix_is_computed(self, sequence: Sequence) -> bool:
        """Whether a running sequence, no less important, computes much that a waiting one will find in the cache.

        A block's hash stands for all tokens up to its end: two sequences share all blocks before one that they share.
        """
        if self._num_state_blocks:
            return False  # it would find the KV, but no states at the end of what both share
        hashes = self._prefix_hashes(sequence)
        blocks = -(-LEAST_AWAITED // self._block_size)
        for other in self.running:
            at = other.num_committed + blocks - 1
            shared = at < len(hashes) and at < len(other.hashes) and hashes[at] == other.hashes[at]
            if shared and other.group.priority <= sequence.group.priority:
                return True
        return False

    def finish_load(self, sequence: Sequence) -> None:
        """Queue a sequence whose load has finished for the next free slot of the batch."""
        sequence.state = SequenceState.LOADED
        insort(self.loaded, sequence, key=_by_key)

    def _start_running(self, sequence: Sequence) -> None:
        """Add a sequence that holds its blocks to the batch."""
        sequence.state = SequenceState.RUNNING
        if self._free_slots is not None:
            sequence.state_slot = heapq.heappop(self._free_slots)
        insort(self.running, sequence, key=_by_key)

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Allocate blocks for ``num_tokens`` tokens, preempting other sequences; ``False``: not in this step."""
        if sequence.state is not SequenceState.RUNNING:
            return False
        need = (-(-num_tokens // self._block_size) - len(sequence.block_ids)) * self._groups.count
        if need <= 0:
            return True
        while (blocks := self._pool.allocate(need)) is None:
            others = (other for other in itertools.chain(self.running, self.loaded) if not other.pinned)
            victim = max(others, key=_by_key, default=None)
            if victim is None:
                return False
            self._preempt(victim)
            plan.counts.pop(victim, None)
            if victim is sequence:
                return False
        sequence.append_blocks(blocks)
        return True

    def room_for_drafts(self, plan: StepPlan) -> int:
        """Return how many draft tokens fit into a step's token budget."""
        return self._budget - plan.num_tokens

    def add_draft(
        self, plan: StepPlan, sequence: Sequence, draft: tuple[int, ...], parents: tuple[int, ...] = ()
    ) -> int:
        """Add a decoding sequence's draft to a step as far as there are free blocks, without preemption.

        Args:
            plan: Plan without drafts of this sequence.
            sequence: Decoding sequence of the plan.
            draft: Draft tokens.
            parents: Index of each draft token's parent, see :class:`StepPlan`; empty: the draft is a chain.

        Returns:
            Number of draft tokens that fit.
        """
        size = self._block_size
        need = -(-(sequence.num_tokens + len(draft)) // size) - len(sequence.block_ids)
        if need > 0:
            need = min(need, self._pool.num_free // self._groups.count)
            sequence.append_blocks(self._pool.allocate(need * self._groups.count) or ())
            draft = draft[: len(sequence.block_ids) * size - sequence.num_tokens]
        if draft:
            plan.drafts[sequence] = draft
            if parents:
                plan.trees[sequence] = parents[: len(draft)]
            if plan.work is not None:
                plan.work.rows += len(draft)
        return len(draft)

    def finish_draft(self, sequence: Sequence) -> None:
        """Register the blocks that a draft filled, and release those that only rejected draft tokens used."""
        self.commit(sequence)
        self._pool.release(sequence.pop_surplus_blocks(self._block_size))

    def _preempt(self, sequence: Sequence) -> None:
        self._remove(sequence)
        self._pool.release(sequence.pop_blocks())
        sequence.state = SequenceState.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(sequence)

    def roll_back(self, sequence: Sequence, count: int) -> None:
        """Remove a sequence's last output tokens and release the blocks that it no longer needs.

        Raises:
            InternalError: It has fewer output tokens, has finished, is being loaded, or is pinned.
        """
        if sequence.pinned or sequence.state not in _MAY_ROLL_BACK:
            raise InternalError(f"a sequence that is {sequence.state.value} or pinned cannot be rolled back")
        self._pool.release(sequence.roll_back(count, self._block_size))
        if sequence.state is SequenceState.RUNNING and self._free_slots is not None:
            self._preempt(sequence)  # its states cannot go back

    def commit(self, sequence: Sequence) -> None:
        """Register full blocks in the prefix cache, and release those outside all attention windows."""
        if self._caching:
            self._register(sequence)
        self.release_out_of_window(sequence)

    def release_out_of_window(self, sequence: Sequence) -> None:
        """Release the blocks that are outside all attention windows, unless other instances may be reading them."""
        if sequence.pinned:
            return
        for table in sequence.windows:
            if gone := table.pop_before(table.first_needed(sequence.num_computed, self._block_size)):
                self._bridge.defer_release(sequence, gone)
                self._pool.release(gone)

    def _register(self, sequence: Sequence) -> None:
        full = sequence.num_computed // self._block_size
        if full <= sequence.num_committed:
            return
        hashes = sequence.hash_blocks(sequence.num_computed, self._block_size)
        request = sequence.group.request
        tenant, session = request.tenant_id, request.session_key
        for i in range(sequence.num_committed, full):
            parent = hashes[i - 1] if i else None
            self._pool.commit(sequence.block_ids[i], hashes[i], parent, tenant=tenant, session=session)
            for table in sequence.windows:
                if i >= table.first:
                    block = table.block_ids[i - table.first]
                    self._pool.commit(block, hashes[i], None, tenant=tenant, session=session, group=table.group)
        sequence.num_committed = full

    def observe_step_time(self, plan: StepPlan, seconds: float) -> None:
        """Learn from the time that a step took."""
        if self.step_budget is not None and plan.work is not None:
            self.step_budget.cost.observe(plan.work, seconds)
            if plan.has_prompts:
                self.step_budget.observe_prompts(plan.num_prompts_ended, seconds)

    def finish(self, sequence: Sequence) -> None:
        """Remove a finished sequence; the blocks of a running load are kept until the load ends."""
        state = sequence.state
        sequence.state = SequenceState.FINISHED
        if state is SequenceState.LOADING:
            self._bridge.cancel_load(sequence)
            return
        if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and not sequence.pinned:
            self.output_lengths.add(sequence.num_output)
        self._remove(sequence, state)
        self._bridge.release_finished(sequence)

    def _remove(self, sequence: Sequence, state: SequenceState | None = None) -> None:
        """Remove a sequence from the queue or list of its state."""
        match state or sequence.state:
            case SequenceState.RUNNING:
                self.running.remove(sequence)
                if self._free_slots is not None:
                    heapq.heappush(self._free_slots, sequence.state_slot)
                    sequence.state_slot = -1
            case SequenceState.LOADED:
                self.loaded.remove(sequence)
            case SequenceState.WAITING:
                self._dequeue(sequence)

    def check_integrity(self) -> None:
        """Check that every state slot is free or one running sequence's.

        Raises:
            AssertionError: A slot leaked or has two owners.
        """
        if self._free_slots is not None:
            slots = [*self._free_slots, *(sequence.state_slot for sequence in self.running)]
            if sorted(slots) != list(range(self._max_seqs)):
                raise AssertionError("state slots are lost, or have two owners")

    def _dequeue(self, sequence: Sequence) -> None:
        self.waiting.discard(sequence)
        self.waiting_to_load.discard(sequence)
