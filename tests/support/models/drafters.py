"""Drafters for tests: right, wrong, right at random, and broken in several ways."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from baton.engine.sequence import Sequence
from baton.engine.speculation.drafter import Proposal


class RecordedDrafter:
    """Knows what each sequence is going to be, and says it, each token right with some probability.

    Args:
        outputs: Output tokens by request and index.
        probability: That a token is the right one; else it is another.
        vocab_size: Tokens are below it.
        seed: Of the errors.
    """

    name = "recorded"
    sequential = False

    def __init__(
        self,
        outputs: dict[tuple[str, int], list[int]],
        *,
        probability: float = 1.0,
        vocab_size: int = 64,
        seed: int = 0,
    ) -> None:
        self.outputs, self.probability, self.vocab_size = outputs, probability, vocab_size
        self.random = random.Random(seed)
        self.num_proposed = 0
        self.live: set[Sequence] = set()

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Proposal]:
        """Return what comes next, with errors."""
        return [self._draft(sequence, limit) for sequence, limit in wanted]

    def _draft(self, sequence: Sequence, limit: int) -> Proposal:
        self.live.add(sequence)
        known = self.outputs[sequence.group.request.request_id, sequence.index]
        at = sequence.num_output
        draft = [
            token if self.random.random() < self.probability else self.random.randrange(self.vocab_size)
            for token in known[at : at + limit]
        ]
        self.num_proposed += len(draft)
        return Proposal(draft)

    def sequence_finished(self, sequence: Sequence) -> None:
        """Forget it."""
        self.live.discard(sequence)

    def close(self) -> None:
        """Nothing is held."""


class RecordedTreeDrafter(RecordedDrafter):
    """Says what each sequence is going to be among other things: trees that have the right token at some place.

    Args:
        outputs: See :class:`RecordedDrafter`; ``probability``: that a right token's children have the right one.
        width: Tokens of a level.
    """

    def __init__(self, outputs: dict[tuple[str, int], list[int]], *, width: int, **options: Any) -> None:
        super().__init__(outputs, **options)
        self.width = width

    def _draft(self, sequence: Sequence, limit: int) -> Proposal:
        self.live.add(sequence)
        known = self.outputs[sequence.group.request.request_id, sequence.index]
        at, rng = sequence.num_output, self.random
        tokens: list[int] = []
        parents: list[int] = []
        level, right = [-1], -1
        for token in known[at : at + limit]:
            children = [(rng.choice(level), rng.randrange(self.vocab_size)) for _ in range(self.width)]
            good = right is not None and rng.random() < self.probability
            if good:
                children[rng.randrange(self.width)] = (right, token)
            first = len(tokens)
            tokens += [token for _, token in children]
            parents += [parent for parent, _ in children]
            level = list(range(first, len(tokens)))
            right = next((i for i in level if good and (parents[i], tokens[i]) == (right, token)), None)
        self.num_proposed += len(tokens)
        return Proposal(tokens, parents=parents)


class BrokenDrafter:
    """Answers with what a function returns, or raises.

    Args:
        answer: Called with each sequence and its limit.
    """

    name = "broken"
    sequential = False

    def __init__(self, answer: Callable[[Sequence, int], SequenceOf[int]]) -> None:
        self.answer = answer
        self.calls = 0

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Proposal]:
        """Return what the function does."""
        self.calls += 1
        return [Proposal(self.answer(sequence, limit)) for sequence, limit in wanted]

    def sequence_finished(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""
