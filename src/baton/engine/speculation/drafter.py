"""The drafter protocols: what the engine needs for speculative decoding."""

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
    """A draft for one sequence.

    Attributes:
        token_ids: Tokens expected to follow the sequence's last one; may be empty.
        chances: Per token, the probability that it is right if those before it are; ``None``: unknown.
        drawn_from: float32 [tokens, vocab], the distribution that each token was drawn from, rows that sum to 1;
            ``None``: not drawn, or greedily. Used by rejection sampling alone.
        parents: Of a tree (:mod:`~baton.engine.speculation.tree`), the index of each token's parent, which comes before
            it; -1: the sequence's last token. The likeliest child comes first. ``None``: the tokens are a chain.
    """

    token_ids: SequenceOf[int]
    chances: SequenceOf[float] | None = None
    drawn_from: Probabilities | None = None
    parents: SequenceOf[int] | None = None


class DrafterHangsError(InternalError):
    """A call of a drafter did not return in time."""


class Drafter(Protocol):
    """Proposes draft tokens. Called in the engine's thread, before each step.

    Proposals never change an answer: a wrong one only costs time. The drafter's state of a sequence may be missing or
    stale at any time.

    Attributes:
        name: Name of the method, for metrics.
        sequential: Whether each draft token takes time; if so, no more are asked for than may pay.
    """

    name: str
    sequential: bool

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Proposal]:
        """Return a proposal for each decoding sequence.

        Args:
            wanted: Sequences, each with the most draft tokens in a row that can be used: for a tree, its depth.
        """

    def sequence_finished(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that has finished."""

    def close(self) -> None:
        """Release all resources; may be called again."""


@runtime_checkable
class ReadsHidden(Protocol):
    """A :class:`Drafter` that drafts from the target's hidden states.

    Attributes:
        hidden_of: Hidden states that it reads, as in :class:`~baton.engine.runner.input_batch.ForwardBatch`.
    """

    hidden_of: tuple[int, ...]

    def observe(self, rows: SequenceOf[tuple[Sequence, int, int]], hidden: tuple[torch.Tensor, ...]) -> None:
        """Receive the hidden states of a step's tokens: of chains all, of trees the accepted ones.

        Args:
            rows: Sequences, each with the position of its first token in the step, and its number of tokens.
            hidden: Per member of ``hidden_of`` [T, width], all sequences' tokens one after the other. Copy what is
                kept: a view keeps the memory of the whole step.
        """


@runtime_checkable
class KeepsContext(Protocol):
    """A :class:`Drafter` with KV of its own that can come with a sequence's blocks.

    Attributes:
        context: Number of tokens whose KV was computed elsewhere: those whose drafter KV came with it ("known"),
            and those without ("lacking").
    """

    context: Counter[str]
