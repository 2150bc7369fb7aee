"""What one step computes: how many query tokens of which sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.sequence import Sequence


@dataclass(slots=True)
class StepPlan:
    """The sequences of a step, decodes first.

    A decoding sequence has one query token as a rule; it has more while it catches up (after a roll-back), or with
    draft tokens: proposals for the tokens that follow its own, of which the step computes KV and logits so that they
    can be verified. Draft tokens come after all of a sequence's own tokens; their KV is not counted as computed until
    they are accepted.

    Attributes:
        counts: Per sequence, how many of its own tokens are computed, from ``num_computed`` on.
        drafts: Draft tokens per sequence, of those that have some; the sequence's own tokens are all computed then.
    """

    counts: dict[Sequence, int] = field(default_factory=dict)
    drafts: dict[Sequence, tuple[int, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.counts)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step, draft tokens included."""
        return sum(self.counts.values()) + sum(map(len, self.drafts.values()))
