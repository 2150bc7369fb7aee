"""Adds drafts to a step's plan: whose, how long, and what becomes of a drafter that fails."""

from __future__ import annotations

import logging
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
from baton.engine.speculation.pace import Pace, Record, worth_drafting
from baton.engine.speculation.rejection import Probabilities
from baton.engine.speculation.tree import MAX_NODES, depths, first_path, is_chain, pick
from baton.types import MAX_SPECULATIVE_TOKENS

if TYPE_CHECKING:
    from baton.engine.grammar.constraint import Constraint

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

    def keep(self, tokens: npt.NDArray[np.int64]) -> None:
        """Keep some tokens alone, ascending, with a token those before it."""
        if self.parents:
            order, parents = pick(self.parents, self.chances, tokens.tolist())
            self.parents = () if is_chain(parents) else parents
        else:
            order = tokens.tolist()
        self.token_ids, self.chances = tuple(self.token_ids[i] for i in order), self.chances[order]


class SpeculationStats:
    """What became of drafts since start.

    Attributes:
        method: Who drafts.
        steps: Steps of sequences that had a draft.
        drafted: Draft tokens verified, by their place in the draft, from 0 on.
        accepted: Those that were right.
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
        drafter: Who proposes; it may do anything wrong.
        vocab_size: Draft tokens must be below it.

    Attributes:
        drawn_from: What the step's drafts were drawn from, as far as they were; ``None``: nobody asks, as drafts are
            kept by equality.
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
        self._usual, self._seen = USUAL_RATE, 0
        self.drafter = drafter
        self.drawn_from: DrawnFrom | None = {} if config.speculative_acceptance == "rejection" else None
        self.stats = SpeculationStats(drafter.name)
        if isinstance(drafter, KeepsContext):
            self.stats.context = drafter.context

    def add_drafts(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Add drafts to the decodes of a plan that is complete else: they get what is left of budget and blocks."""
        if self.drawn_from is not None:
            self.drawn_from.clear()
        self._planned, self._asked = plan.trees, False
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
            plan: Of the step.
            hidden: Of all its tokens.
            paths: Which draft tokens were right: of trees these alone are shown.
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
        """Take note of what became of a draft.

        Args:
            sequence: Whose.
            drafted: Its tokens.
            path: Those of them that were right, one after the other.
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

    def note_time(self, plan: StepPlan, seconds: float, drafting: float) -> None:
        """Learn from the time that a step took, :meth:`add_drafts` included, which took ``drafting`` seconds of it."""
        if self._pace is not None and plan.num_tokens == len(plan.counts) + sum(map(len, plan.drafts.values())):
            self._pace.observe(plan.num_tokens, seconds, drafting if self._asked else 0.0, drafts=bool(plan.drafts))

    def ended(self, sequence: Sequence) -> None:
        """Take note that a sequence has ended."""
        self._records.pop(sequence, None)
        self._promised.pop(sequence, None)
        try:
            self.drafter.ended(sequence)
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
        found = []
        for draft, mine in zip(drafts, np.split(taken, np.cumsum(counts)[:-1]), strict=True):
            if len(kept := np.flatnonzero(mine)):
                draft.keep(kept)
                found.append(draft)
            else:
                self._records[draft.sequence].idle(max(USUAL_RATE, self._usual))
        return found

    def _propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Proposal]:
        try:
            found = self.drafter.propose(wanted)
            if len(found) != len(wanted):
                raise ValueError(f"{len(found)} drafts for {len(wanted)} sequences")
        except DrafterHangsError:
            self._failed("hangs")
            return []
        except Exception:
            self._failed("raised")
            return []
        self._failures = 0
        return found

    def _failed(self, reason: str) -> None:
        self.stats.faults[reason] += 1
        self._rest = min(MOST_REST, 1 << self._failures)
        if not self._failures:
            log.exception("drafter %s failed: sequences go on without", self.drafter.name)
        self._failures += 1

    def _usable(self, sequence: Sequence, proposal: Proposal, limit: int) -> _Draft:
        """Return the part of a draft that can come true: known tokens, none behind an end, as the grammar allows."""
        tokens, given, parents = proposal.token_ids, proposal.chances, proposal.parents
        if parents is not None and not self._trees:
            path = first_path(parents)
            tokens, parents = [tokens[i] for i in path], None
            given = None if given is None else [given[i] for i in path]
        # Of what was drawn a grammar takes only what it allows: that is no draw from the whole any more.
        drawn_from = proposal.drawn_from if sequence.sampler.constraint is None else None
        usable = _Usable(sequence, self._vocab_size, limit, branches=parents is not None)
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
        told = None if given is None else np.array([given[i] for i in kept], np.float64)
        own = () if parents is None else tuple(usable.parents)
        return _Draft(sequence, tuple(usable.tokens), record.chances(told, len(kept), own), drawn_from, own)


class _Usable:
    """The tokens of a draft that can come true, collected one by one.

    Args:
        sequence: Whose draft.
        vocab_size: Tokens are below it.
        limit: How many tokens may come one after the other.
        branches: Whether several tokens may have one parent.

    Attributes:
        tokens: Those that can.
        parents: Of each the index among them; -1: the sequence's last token.
        kept: Of each the index in the draft.
        bad_ids: How many others do not exist.
    """

    def __init__(self, sequence: Sequence, vocab_size: int, limit: int, *, branches: bool) -> None:
        self.tokens, self.parents, self.kept, self.bad_ids = list[int](), list[int](), list[int](), 0
        self._sequence, self._vocab_size, self._limit, self._branches = sequence, vocab_size, limit, branches
        constraint = sequence.sampler.constraint
        # Per token: its index among those kept, its depth, and the grammar after it.
        self._open: dict[int, tuple[int, int, Constraint | None]] = {-1: (-1, 0, constraint)}
        self._seen: set[tuple[int, int]] = set()

    def add(self, index: int, token: int, parent: int) -> bool:
        """Take a token whose parent came before; returns whether it can come true."""
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
    found: list[tuple[Sequence, int, int]] = []
    kept: list[int] = []
    at = 0
    for sequence, start, count in rows:
        if sequence in plan.trees:
            own, path = plan.counts[sequence], paths.get(sequence, ())
            found.append((sequence, start, own + len(path)))
            kept += [*range(at, at + own), *(at + own + node for node in path)]
        else:
            found.append((sequence, start, count))
            kept += range(at, at + count)
        at += count
    return found, kept
