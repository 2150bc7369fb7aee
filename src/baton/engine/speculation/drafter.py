"""What proposes draft tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from baton.engine.sequence import Sequence
from baton.engine.speculation.rejection import Probabilities
from baton.errors import InternalError


@dataclass(frozen=True, slots=True)
class Proposal:
    """How one sequence may go on.

    Attributes:
        token_ids: The tokens expected to follow its last one; none is a valid answer.
        chances: Parallel to them, how likely each is right if those before it are; ``None``: as the past says.
        drawn_from: float32 [tokens, vocab], what each was drawn from, rows that sum to 1; ``None``: it was not drawn,
            or greedily. For acceptance by rejection alone.
        parents: Of a tree (:mod:`~baton.engine.speculation.tree`), the index of each token's parent, which comes before
            it; -1: the sequence's last token. The likeliest child comes first. ``None``: the tokens are a chain.
    """

    token_ids: SequenceOf[int]
    chances: SequenceOf[float] | None = None
    drawn_from: Probabilities | None = None
    parents: SequenceOf[int] | None = None


class DrafterHangsError(InternalError):
    """A drafter has not come back from a call in time."""


class Drafter(Protocol):
    """Proposes how sequences may go on. Called in the engine's thread, before each step.

    Nothing that it says changes an answer: a proposal that is wrong costs time alone. What it keeps of a sequence may
    be missing or stale at any time.

    Attributes:
        name: The method, for metrics.
        sequential: Whether each token that it drafts takes time: then it is asked for no more than may pay.
    """

    name: str
    sequential: bool

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Proposal]:
        """Return draft tokens for sequences that decode, parallel to them.

        Args:
            wanted: Sequences, each with the most tokens that can be used, one after the other; of a tree that is its
                depth.
        """

    def sequence_finished(self, sequence: Sequence) -> None:
        """Take note that a sequence has ended and comes no more."""

    def close(self) -> None:
        """Give back what it holds; harmless if repeated."""


@runtime_checkable
class ReadsHidden(Protocol):
    """A :class:`Drafter` that drafts from the target's hidden states.

    Attributes:
        hidden_of: Which ones, as :class:`~baton.engine.runner.input_batch.ForwardBatch` has them.
    """

    hidden_of: tuple[int, ...]

    def observe(self, rows: SequenceOf[tuple[Sequence, int, int]], hidden: tuple[torch.Tensor, ...]) -> None:
        """Take what a step computed; of chains of drafts all, of trees the tokens that were right.

        Args:
            rows: Sequences, each with the position of its first token of the step, and how many it had.
            hidden: Per member of ``hidden_of`` [T, width], all sequences' tokens one after the other. A view of them
                takes the memory of the whole step: what is kept is to be copied.
        """


@runtime_checkable
class KeepsContext(Protocol):
    """A :class:`Drafter` with KV of its own that can come with a sequence's blocks.

    Attributes:
        context: Tokens of sequences whose KV was computed elsewhere: of how many the drafter's came with it ("known"),
            and of how many it did not ("lacking").
    """

    context: Counter[str]
