"""Adds drafts to a step's plan: whose, how long, and what becomes of a drafter that fails."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from baton.config import EngineConfig
from baton.engine.scheduler import Scheduler, StepPlan
from baton.engine.sequence import Sequence
from baton.engine.speculation.drafter import Drafter, DrafterHangsError, KeepsContext, Proposal, ReadsHidden
from baton.engine.speculation.pace import Pace, Record, worth_drafting
from baton.types import MAX_SPECULATIVE_TOKENS

log = logging.getLogger(__name__)

DrawnFrom: TypeAlias = dict[Sequence, npt.NDArray[np.float32]]
"""Per sequence [tokens, vocab], rows that sum to 1."""

USUAL_RATE = 0.3
"""Share of draft tokens that are taken to be right before anything is known, and again after long."""
MOST_ROWS = 256
"""Draft tokens of a step at most: each takes a row of logits."""
MOST_REST = 1024
"""Steps at most that a drafter rests after failures in a row; it doubles from 1 on."""


@dataclass(slots=True)
class _Draft:
    """A draft, per token the chance that it and those before it are right, float64, and what it was drawn from."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    chances: npt.NDArray[np.float64]
    drawn_from: npt.NDArray[np.float32] | None


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
        config: ``speculative_tokens``, ``speculative_acceptance``.
        drafter: Who proposes; it may do anything wrong.
        vocab_size: Draft tokens must be below it.

    Attributes:
        drawn_from: What the step's drafts were drawn from, as far as they were; ``None``: nobody asks, as drafts are
            kept by equality.
    """

    def __init__(self, config: EngineConfig, drafter: Drafter, vocab_size: int) -> None:
        self._most = config.speculative_tokens or MAX_SPECULATIVE_TOKENS
        self._pace = Pace() if config.speculative_tokens is None else None
        self._vocab_size = vocab_size
        self._failures = self._rest = 0
        self._records: dict[Sequence, Record] = {}
        self._promised: dict[Sequence, float] = {}
        self._usual = USUAL_RATE
        self.drafter = drafter
        self.drawn_from: DrawnFrom | None = {} if config.speculative_acceptance == "rejection" else None
        self.stats = SpeculationStats(drafter.name)
        if isinstance(drafter, KeepsContext):
            self.stats.context = drafter.context

    def add_drafts(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Add drafts to the decodes of a plan that is complete else: they get what is left of budget and blocks."""
        if self.drawn_from is not None:
            self.drawn_from.clear()
        room = min(scheduler.room_for_drafts(plan), MOST_ROWS)
        if room <= 0 or self._rest > 0 or (self._pace is not None and self._pace.wait()):
            self._rest = max(0, self._rest - 1)
            return
        wanted = [(s, limit) for s, n in plan.counts.items() if (limit := min(self._limit(s, n), room)) > 0]
        if not wanted:
            return
        drafts = [
            draft
            for (sequence, limit), proposed in zip(wanted, self._propose(wanted), strict=False)
            if (draft := self._usable(sequence, proposed, limit)).token_ids
        ]
        for draft in self._chosen(drafts, plan, room):
            if room <= 0:
                return
            self._promised[draft.sequence] = float(draft.chances[: len(draft.token_ids)].sum())
            if self.drawn_from is not None and draft.drawn_from is not None:
                self.drawn_from[draft.sequence] = draft.drawn_from
            room -= scheduler.add_draft(plan, draft.sequence, draft.token_ids[:room])

    @property
    def hidden_of(self) -> tuple[int, ...]:
        """Which hidden states of the target a step has to give to :meth:`observe`."""
        return self.drafter.hidden_of if isinstance(self.drafter, ReadsHidden) else ()

    def observe(self, plan: StepPlan, hidden: tuple[torch.Tensor, ...]) -> None:
        """Show the drafter the hidden states of a step's tokens, before any of them counts as computed."""
        if not hidden or not isinstance(self.drafter, ReadsHidden):
            return
        drafts = plan.drafts
        rows = [(s, s.num_computed, count + len(drafts.get(s, ()))) for s, count in plan.counts.items()]
        try:
            self.drafter.observe(rows, hidden)
        except Exception:
            self._failed("raised")

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Take note of what became of a draft."""
        sequence.num_drafted += drafted
        sequence.num_accepted += accepted
        stats = self.stats
        stats.steps += 1
        stats.drafted.update(range(drafted))
        stats.accepted.update(range(accepted))
        self._usual += 0.02 * ((accepted > 0) - self._usual)
        record = self._records.get(sequence)
        if record is not None:
            record.verified(drafted, accepted, self._promised.pop(sequence, 0.0))

    def note_time(self, plan: StepPlan, seconds: float) -> None:
        """Learn from the time that a step took, with its drafts."""
        if self._pace is not None and plan.num_tokens == len(plan.counts) + sum(map(len, plan.drafts.values())):
            self._pace.times.observe(plan.num_tokens, seconds)

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
        counts = [len(draft.token_ids) for draft in drafts]
        chances = np.concatenate([draft.chances for draft in drafts])
        best = np.argsort(-chances, kind="stable")
        most = min(len(best), room)
        if self._pace is not None:
            most = self._pace.choose(chances[best[:most]], len(plan.counts), plan.num_tokens)
        taken = np.bincount(np.repeat(np.arange(len(drafts)), counts)[best[:most]], minlength=len(drafts))
        found = []
        for draft, count in zip(drafts, taken.tolist(), strict=True):
            if count:
                draft.token_ids = draft.token_ids[:count]
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
        draft: list[int] = []
        row = sequence.sampler
        constraint = None if row.constraint is None else row.constraint.fork()
        for token in proposal.token_ids[:limit]:
            if not 0 <= token < self._vocab_size:
                self.stats.faults["bad_ids"] += 1
                break
            if constraint is not None and (constraint.complete or not constraint.allows(token)):
                break
            draft.append(int(token))
            if sequence.ends_with(token):
                break
            if constraint is not None:
                constraint.append(token)
        record = self._records.get(sequence)
        if record is None:
            record = self._records[sequence] = Record(max(USUAL_RATE, self._usual))
        given = None if proposal.chances is None else np.array(proposal.chances[: len(draft)], np.float64)
        # Of what was drawn a grammar takes only what it allows: that is no draw from the whole any more.
        drawn_from = proposal.drawn_from if constraint is None else None
        return _Draft(sequence, tuple(draft), record.chances(given, len(draft)), drawn_from)
