"""Adds drafts to a step's plan: whose, how long, and what becomes of a drafter that fails."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from baton.config import EngineConfig
from baton.engine.scheduler import Scheduler, StepPlan
from baton.engine.sequence import Sequence
from baton.engine.speculation.drafter import Drafter, DrafterHangsError, KeepsContext, Proposal, ReadsHidden
from baton.engine.speculation.rejection import Probabilities
from baton.engine.speculation.tree import MAX_NODES, chances_of, depths, first_path, is_chain, pick
from baton.types import MAX_SPECULATIVE_TOKENS

if TYPE_CHECKING:
    from baton.engine.grammar.constraint import Constraint

GAIN = 1.02
"""Drafts must be expected to give so many times the tokens per second: what is learnt of times is not exact."""
MOST_PAUSE = 32
"""Steps at most between two looks at whether drafts pay, after those that did not; it doubles from 1 on ..."""
LOOK_SHARE = 0.01
"""... and is so long that drafting for the looks takes no more than this share of the time, ..."""
COSTLY_PAUSE = 512
"""... but no longer than this."""
TRIAL = 32
"""Every so many steps with drafts, one without or with twice as many is run, to see what it takes ..."""
RARE_TRIAL = 8
"""... and after so many looks that found none to pay, one with a draft token per sequence."""
FIRST_TRIALS = 4
"""So many such trials come first, whatever the looks find: nothing is known then of how often drafts are right."""

_FEW = 16
"""Numbers of rows up to this one are told apart; beyond, eighths of an octave."""
_COMMON = 0.15
"""Weight of a step in what all sizes have in common: longer contexts, a machine that is busy ..."""
_OWN = 0.1
"""... and in what is known of its own size."""
_OUTLIER = 1.0
"""A step that took e times what was expected, or more, counts as that."""
_PLATEAU = 8.0
"""Before it is known: a step of n rows takes as long as n plus so many would, were its time proportional."""


class StepTimes:
    """Seconds of steps by their number of rows, in logarithms: a part that all share, and one for each size."""

    def __init__(self) -> None:
        self._common = math.nan
        self._own: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._rows: npt.NDArray[np.float64] = np.empty(0)
        self._logs: npt.NDArray[np.float64] = np.empty(0)

    def knows(self, rows: int) -> bool:
        """Whether a step of about so many rows was observed."""
        return _size(rows) in self._own

    def observe(self, rows: int, seconds: float) -> None:
        """Add the time of a step."""
        size = _size(rows)
        took = math.log(max(seconds, 1e-7))
        self._seen[size] = seen = self._seen.get(size, 0) + 1
        if not self._own:
            self._common = took
            self._own[size] = 0.0
        elif size not in self._own:
            self._own[size] = took - self._common
        else:
            error = took - self._common - self._own[size]
            error = max(-_OUTLIER, min(_OUTLIER, error))
            self._common += _COMMON * error
            # A size's first step is often slow, and few others put that right if drafts are turned off because of it.
            self._own[size] += max(_OWN, 1.0 / (seen - 0.5)) * error
        sizes = sorted(self._own)
        self._rows = np.array([_rows_of(each) for each in sizes])
        self._logs = np.array([self._own[each] for each in sizes]) - np.log(self._rows + _PLATEAU)

    def relative(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the seconds that steps take, but for a factor that is common to all.

        Args:
            rows: float64 [n]; at least one step must have been observed.
        """
        return (rows + _PLATEAU) * np.exp(np.interp(rows, self._rows, self._logs))


def _size(rows: int) -> int:
    return rows if rows <= _FEW else _FEW + round(8.0 * math.log2(rows / _FEW))


def _rows_of(size: int) -> float:
    return float(size) if size <= _FEW else _FEW * 2.0 ** ((size - _FEW) / 8.0)


class Pace:
    """Decides on the number of draft tokens of a step, and when to look again after there were none.

    Attributes:
        times: Observed times of steps.
    """

    def __init__(self) -> None:
        self.times = StepTimes()
        self._pause = self._next_pause = 0
        self._drafted = self._vain = self._trials = 0
        self._look_cost = 0.0
        """What drafting takes, in steps without drafts."""

    def observe(self, rows: int, seconds: float, drafting: float, *, drafts: bool) -> None:
        """Learn from a step.

        Args:
            rows: Tokens that it computed.
            seconds: Time of the step in seconds, proposal included.
            drafting: Seconds of that which the drafter took; 0: it was not asked.
            drafts: Whether the step had draft tokens.
        """
        if drafting:
            cost = drafting / max(seconds - drafting, 1e-7)
            self._look_cost += _COMMON * (cost - self._look_cost)
        # Drafts cost what they take to propose; a step that had none would have done without the proposal.
        self.times.observe(rows, seconds if drafts else seconds - drafting)

    def wait(self) -> bool:
        """Whether this step is one to leave out because drafts did not pay."""
        if self._pause:
            self._pause -= 1
            return True
        return False

    def choose(self, chances: npt.NDArray[np.float64], sequences: int, rows: int) -> int:
        """Return how many draft tokens to verify.

        Args:
            chances: float64 [n], of draft tokens, that each and those before it are right; falling.
            sequences: Sequences that get a token from the step without drafts.
            rows: Tokens that the step computes anyway.
        """
        if not len(chances) or not self.times.knows(rows):
            return 0  # what it takes without drafts is what all is compared with
        tokens = sequences + np.concatenate([[0.0], np.cumsum(chances)])
        rates = tokens / self.times.relative(rows + np.arange(len(tokens), dtype=np.float64))
        best = int(rates.argmax())
        if best and rates[best] >= GAIN * rates[0]:
            self._next_pause = self._vain = 0
            self._drafted += 1
            if self._drafted % TRIAL:
                return best
            return 0 if self._drafted % (2 * TRIAL) else min(len(chances), 2 * best)
        self._vain += 1
        trial = min(len(chances), sequences)
        if self._trials < FIRST_TRIALS or self._vain % RARE_TRIAL == 0:
            self._trials += 1
            return trial
        self._next_pause = min(MOST_PAUSE, 2 * self._next_pause + 1)
        self._pause = max(self._next_pause, min(COSTLY_PAUSE, round(self._look_cost / LOOK_SHARE)))
        return 0


def worth_drafting(rate: float) -> int:
    """Return how many tokens to draft where each takes time and is right with this probability: 1 to 8."""
    rate = min(0.99, max(0.01, rate))
    return max(1, min(8, int(math.log(0.25) / math.log(rate))))


class Record:
    """How a sequence's drafts fared: the share of tokens that were right, and that relative to what was promised.

    Args:
        rate: Expected share of right tokens before anything is observed.
    """

    __slots__ = ("expected", "rate", "right")

    NEWS = 0.15
    PROMISES = 4.0

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.right = self.expected = self.PROMISES

    def chances(
        self, given: npt.NDArray[np.float64] | None, count: int, parents: tuple[int, ...] = ()
    ) -> npt.NDArray[np.float64]:
        """Return how likely each of ``count`` draft tokens and all before it are right.

        Args:
            given: The drafter's probability of each token if those before it are right; ``None``: none.
            count: Draft tokens.
            parents: Index of each token's parent; empty: the draft is a chain.
        """
        if parents:
            known = None if given is None else given.tolist()
            return chances_of(parents, known, self.rate, min(1.0, self.right / self.expected))
        if given is None:
            return np.full(count, self.rate).cumprod()
        return (given * min(1.0, self.right / self.expected)).cumprod()

    def verified(self, drafted: int, accepted: int, promised: float) -> None:
        """Learn from a draft.

        Args:
            drafted: Places that it had tokens for: of a tree, along the tokens that were right.
            accepted: Tokens that were right.
            promised: How many were to be expected.
        """
        for at in range(min(accepted + 1, drafted)):
            self.rate += self.NEWS * ((at < accepted) - self.rate)
        keep = 1.0 - self.NEWS
        self.right = keep * self.right + accepted
        self.expected = max(keep * self.expected + promised, 1e-3)

    def idle(self, usual: float) -> None:
        """Forget a little: what did not pay may pay again."""
        self.rate += 0.005 * (usual - self.rate)


log = logging.getLogger(__name__)

DrawnFrom: TypeAlias = dict[Sequence, Probabilities]
"""Per sequence [tokens, vocab], rows that sum to 1."""

USUAL_RATE = 0.3
"""Share of draft tokens that are taken to be right before anything is known, and again after long ..."""
_USUAL_DRAFTS = 8
"""... as if so many drafts had shown it."""
_LATEST = 0.02
"""Weight at least of a draft in that share."""
MOST_ROWS = 256
"""Draft tokens of a step at most: each takes a row of logits."""
MOST_REST = 1024
"""Steps at most that a drafter rests after failures in a row; it doubles from 1 on."""


@dataclass(slots=True)
class _Draft:
    """A draft, per token the chance that it and those before it are right, float64, and what it was drawn from.

    ``parents``: of a tree's tokens; empty: it is a chain.
    """

    sequence: Sequence
    token_ids: tuple[int, ...]
    chances: npt.NDArray[np.float64]
    drawn_from: Probabilities | None
    parents: tuple[int, ...] = ()

    def truncate_to(self, tokens: npt.NDArray[np.int64]) -> None:
        """Drop all tokens but some, given in ascending order; a kept token's predecessors are kept too."""
        if self.parents:
            order, parents = pick(self.parents, self.chances, tokens.tolist())
            self.parents = () if is_chain(parents) else parents
        else:
            order = tokens.tolist()
        self.token_ids = tuple(self.token_ids[i] for i in order)
        self.chances = self.chances[order]


class SpeculationStats:
    """Counters of drafts since start.

    Attributes:
        method: Name of the drafter.
        steps: Steps of sequences that had a draft.
        drafted: Draft tokens verified, by their place in the draft, from 0 on.
        accepted: Draft tokens accepted, by their place in the draft.
        faults: Proposals that could not be used, by reason.
        context: See :class:`~baton.engine.speculation.drafter.KeepsContext`.
    """

    def __init__(self, method: str) -> None:
        self.method = method
        self.steps = 0
        self.drafted: Counter[int] = Counter()
        self.accepted: Counter[int] = Counter()
        self.faults: Counter[str] = Counter()
        self.context: Counter[str] = Counter()


class Speculator:
    """Has a drafter propose tokens for the sequences of a step.

    Args:
        config: ``speculative_tokens``, ``speculative_width``, ``speculative_acceptance``.
        drafter: Proposes tokens; its errors and wrong proposals are tolerated.
        vocab_size: Draft tokens must be below it.

    Attributes:
        drawn_from: What the step's drafts were drawn from, as far as they were; ``None``: not needed, as drafts
            are accepted by equality.
    """

    def __init__(self, config: EngineConfig, drafter: Drafter, vocab_size: int) -> None:
        self._most = config.speculative_tokens or MAX_SPECULATIVE_TOKENS
        self._pace = Pace() if config.speculative_tokens is None else None
        self._trees = config.speculative_width > 1
        self._planned: dict[Sequence, tuple[int, ...]] = {}
        self._vocab_size = vocab_size
        self._failures = self._rest = 0
        self._asked = False
        self._records: dict[Sequence, Record] = {}
        self._promised: dict[Sequence, float] = {}
        self._usual = USUAL_RATE
        self._seen = 0
        self.drafter = drafter
        self.drawn_from: DrawnFrom | None = {} if config.speculative_acceptance == "rejection" else None
        self.stats = SpeculationStats(drafter.name)
        if isinstance(drafter, KeepsContext):
            self.stats.context = drafter.context

    def add_drafts(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Add drafts to the decodes of a plan that is complete else: they get what is left of budget and blocks."""
        if self.drawn_from is not None:
            self.drawn_from.clear()
        self._planned = plan.trees
        self._asked = False
        room = min(scheduler.room_for_drafts(plan), MOST_ROWS)
        if room <= 0 or self._rest > 0 or (self._pace is not None and self._pace.wait()):
            self._rest = max(0, self._rest - 1)
            return
        wanted = [(s, limit) for s, n in plan.counts.items() if (limit := min(self._limit(s, n), room)) > 0]
        if not wanted:
            return
        self._asked = True
        drafts = [
            draft
            for (sequence, limit), proposed in zip(wanted, self._propose(wanted), strict=False)
            if (draft := self._usable(sequence, proposed, limit)).token_ids
        ]
        for draft in self._chosen(drafts, plan, room):
            if room <= 0:
                return
            self._promised[draft.sequence] = float(draft.chances.sum())
            if self.drawn_from is not None and draft.drawn_from is not None:
                self.drawn_from[draft.sequence] = draft.drawn_from
            room -= scheduler.add_draft(plan, draft.sequence, draft.token_ids[:room], draft.parents)

    @property
    def hidden_of(self) -> tuple[int, ...]:
        """Which hidden states of the target a step has to give to :meth:`observe`."""
        return self.drafter.hidden_of if isinstance(self.drafter, ReadsHidden) else ()

    def observe(self, plan: StepPlan, hidden: tuple[torch.Tensor, ...], paths: dict[Sequence, tuple[int, ...]]) -> None:
        """Show the drafter the hidden states of a step's tokens, before any of them counts as computed.

        Args:
            plan: Plan of the step.
            hidden: Hidden states of all its tokens.
            paths: Accepted draft tokens per sequence; of trees these alone are shown.
        """
        if not hidden or not isinstance(self.drafter, ReadsHidden):
            return
        drafts = plan.drafts
        rows = [(s, s.num_computed, count + len(drafts.get(s, ()))) for s, count in plan.counts.items()]
        if plan.trees:
            rows, kept = _right_rows(plan, rows, paths)
            hidden = tuple(each[kept] for each in hidden)
        try:
            self.drafter.observe(rows, hidden)
        except Exception:
            self._failed("raised")

    def verified(self, sequence: Sequence, drafted: int, path: SequenceOf[int]) -> None:
        """Record how many tokens of a draft were accepted.

        Args:
            sequence: Sequence of the draft.
            drafted: Number of draft tokens.
            path: Indices of the accepted ones, one after the other.
        """
        accepted = len(path)
        sequence.num_drafted += drafted
        sequence.num_accepted += accepted
        stats = self.stats
        stats.steps += 1
        parents = self._planned.get(sequence)
        if parents is None:
            stats.drafted.update(range(drafted))
        else:
            stats.drafted.update(depths(parents))
            drafted = accepted + ((path[-1] if path else -1) in parents)
        stats.accepted.update(range(accepted))
        self._seen += 1
        self._usual += max(_LATEST, 1.0 / (self._seen + _USUAL_DRAFTS)) * ((accepted > 0) - self._usual)
        record = self._records.get(sequence)
        if record is not None:
            record.verified(drafted, accepted, self._promised.pop(sequence, 0.0))

    def observe_step_time(self, plan: StepPlan, seconds: float, drafting: float) -> None:
        """Learn from the time that a step took, :meth:`add_drafts` included, which took ``drafting`` seconds of it."""
        if self._pace is not None and plan.num_tokens == len(plan.counts) + sum(map(len, plan.drafts.values())):
            self._pace.observe(plan.num_tokens, seconds, drafting if self._asked else 0.0, drafts=bool(plan.drafts))

    def sequence_finished(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""
        self._records.pop(sequence, None)
        self._promised.pop(sequence, None)
        try:
            self.drafter.sequence_finished(sequence)
        except Exception:
            self._failed("raised")

    def _limit(self, sequence: Sequence, count: int) -> int:
        """Return how many draft tokens a sequence of a plan could use."""
        if count != 1 or sequence.num_missing != 1 or sequence.pinned:
            return 0
        own = sequence.group.sampling.speculative_tokens
        # Of the tokens that it may still have, the step gives one without any draft.
        left = sequence.max_output - sequence.num_output - 1
        most = self._most
        if self._pace is not None and self.drafter.sequential:
            record = self._records.get(sequence)
            most = worth_drafting(USUAL_RATE if record is None else record.rate)
        return min(most if own is None else min(own, most), left)

    def _chosen(self, drafts: list[_Draft], plan: StepPlan, room: int) -> list[_Draft]:
        """Return the drafts, as long as they pay, those first that are the likeliest to come true."""
        if not drafts:
            return []
        counts = np.array([len(draft.token_ids) for draft in drafts])
        chances = np.concatenate([draft.chances for draft in drafts])
        best = np.argsort(-chances, kind="stable")
        most = min(len(best), room)
        if self._pace is not None:
            most = self._pace.choose(chances[best[:most]], len(plan.counts), plan.num_tokens)
        taken = np.zeros(len(chances), np.bool_)
        taken[best[:most]] = True
        chosen = []
        for draft, draft_taken in zip(drafts, np.split(taken, np.cumsum(counts)[:-1]), strict=True):
            if len(kept := np.flatnonzero(draft_taken)):
                draft.truncate_to(kept)
                chosen.append(draft)
            else:
                self._records[draft.sequence].idle(max(USUAL_RATE, self._usual))
        return chosen

    def _propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Proposal]:
        try:
            proposals = self.drafter.propose(wanted)
            if len(proposals) != len(wanted):
                raise ValueError(f"{len(proposals)} drafts for {len(wanted)} sequences")
        except DrafterHangsError:
            self._failed("hangs")
            return []
        except Exception:
            self._failed("raised")
            return []
        self._failures = 0
        return proposals

    def _failed(self, reason: str) -> None:
        self.stats.faults[reason] += 1
        self._rest = min(MOST_REST, 1 << self._failures)
        if not self._failures:
            log.exception("drafter %s failed: sequences go on without", self.drafter.name)
        self._failures += 1

    def _usable(self, sequence: Sequence, proposal: Proposal, limit: int) -> _Draft:
        """Return the part of a draft that can come true: known tokens, none behind an end, as the grammar allows."""
        tokens = proposal.token_ids
        given = proposal.chances
        parents = proposal.parents
        if parents is not None and not self._trees:
            path = first_path(parents)
            tokens = [tokens[i] for i in path]
            parents = None
            given = None if given is None else [given[i] for i in path]
        # Of what was drawn a grammar takes only what it allows: that is no draw from the whole any more.
        drawn_from = proposal.drawn_from if sequence.sampler.constraint is None else None
        usable = _UsableTokens(sequence, self._vocab_size, limit, branches=parents is not None)
        if parents is None:
            for i, token in enumerate(tokens[:limit]):
                if not usable.add(i, token, i - 1):
                    break
        else:
            for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
                if len(usable.kept) < MAX_NODES:
                    usable.add(i, token, parent)
        if usable.bad_ids:
            self.stats.faults["bad_ids"] += usable.bad_ids
        record = self._records.get(sequence)
        if record is None:
            record = self._records[sequence] = Record(max(USUAL_RATE, self._usual))
        kept = usable.kept
        known = None if given is None else np.array([given[i] for i in kept], np.float64)
        own = () if parents is None else tuple(usable.parents)
        return _Draft(sequence, tuple(usable.tokens), record.chances(known, len(kept), own), drawn_from, own)


class _UsableTokens:
    """The tokens of a draft that can be accepted, collected one by one.

    Args:
        sequence: Sequence of the draft.
        vocab_size: Tokens are below it.
        limit: How many tokens may come one after the other.
        branches: Whether several tokens may have one parent.

    Attributes:
        tokens: Tokens that can be accepted.
        parents: Index of each token's parent among ``tokens``; -1: the sequence's last token.
        kept: Index of each token in the draft.
        bad_ids: Number of draft tokens that are not in the vocabulary.
    """

    def __init__(self, sequence: Sequence, vocab_size: int, limit: int, *, branches: bool) -> None:
        self.tokens = list[int]()
        self.parents = list[int]()
        self.kept = list[int]()
        self.bad_ids = 0
        self._sequence = sequence
        self._vocab_size = vocab_size
        self._limit = limit
        self._branches = branches
        constraint = sequence.sampler.constraint
        # Per token: its index among those kept, its depth, and the grammar after it.
        self._open: dict[int, tuple[int, int, Constraint | None]] = {-1: (-1, 0, constraint)}
        self._seen: set[tuple[int, int]] = set()

    def add(self, index: int, token: int, parent: int) -> bool:
        """Add a token whose parent came before; return whether it can be accepted."""
        above = self._open.get(parent)
        if above is None:
            return False
        at, depth, constraint = above
        if not 0 <= token < self._vocab_size:
            self.bad_ids += 1
            return False
        if depth == self._limit or (at, token) in self._seen:
            return False
        if constraint is not None and (constraint.complete or not constraint.allows(token)):
            return False
        self._seen.add((at, token))
        if not self._sequence.ends_with(token):
            if constraint is not None:
                if self._branches or not self.kept:
                    constraint = constraint.fork()
                constraint.append(token)
            self._open[index] = len(self.kept), depth + 1, constraint
        self.tokens.append(int(token))
        self.parents.append(at)
        self.kept.append(index)
        return True


def _right_rows(
    plan: StepPlan, rows: SequenceOf[tuple[Sequence, int, int]], paths: dict[Sequence, tuple[int, ...]]
) -> tuple[list[tuple[Sequence, int, int]], list[int]]:
    """Return the rows of a step without the tokens of trees that were refused, and which of its tokens those are."""
    right: list[tuple[Sequence, int, int]] = []
    kept: list[int] = []
    at = 0
    for sequence, start, count in rows:
        if sequence in plan.trees:
            own = plan.counts[sequence]
            path = paths.get(sequence, ())
            right.append((sequence, start, own + len(path)))
            kept += [*range(at, at + own), *(at + own + node for node in path)]
        else:
            right.append((sequence, start, count))
            kept += range(at, at + count)
        at += count
    return right, kept
