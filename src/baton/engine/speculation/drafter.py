"""What proposes draft tokens, and how an implementation is chosen."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from baton.config import EngineConfig
from baton.engine.executor.base import Executor
from baton.engine.plugins import find_implementation
from baton.engine.sequence import Sequence
from baton.errors import ConfigError

BUILT_IN = {
    "draft": "baton.engine.speculation.draft_model:load_draft_model",
    "eagle": "baton.engine.speculation.eagle:load_eagle",
    "eagle3": "baton.engine.speculation.eagle:load_eagle",
    "medusa": "baton.engine.speculation.medusa:load_medusa",
    "ngram": "baton.engine.speculation.ngram:NgramDrafter",
    "suffix": "baton.engine.speculation.suffix:SuffixDrafter",
}
"""Methods of ``--speculative``: a new one is a file and a line here."""
ENTRY_POINTS = "baton.drafters"
"""Entry point group of other packages' methods: a callable that takes the :class:`EngineConfig` and the executor."""
NOT_THERE = ("mtp",)
"""Methods known from elsewhere that there are not here; an installed package may bring one of such a name."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """How one sequence may go on.

    Attributes:
        token_ids: The tokens expected to follow its last one; none is a valid answer.
        chances: Parallel to them, how likely each is right if those before it are; ``None``: as the past says.
    """

    token_ids: SequenceOf[int]
    chances: SequenceOf[float] | None = None


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
            wanted: Sequences, each with the most tokens that can be used.
        """

    def ended(self, sequence: Sequence) -> None:
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
        """Take what a step computed, of tokens that may be refused later, too.

        Args:
            rows: Sequences, each with the position of its first token of the step, and how many it had.
            hidden: Per member of ``hidden_of`` [T, width], all sequences' tokens one after the other. A view of them
                takes the memory of the whole step: what is kept is to be copied.
        """


def load_drafter(config: EngineConfig, executor: Executor) -> Drafter | None:
    """Return what drafts for a loaded model; ``None``: nobody is to.

    Raises:
        ConfigError: There is no such method, or it cannot work with this model; names the field.
    """
    name = config.speculative
    if name == "none":
        return None
    try:
        make = find_implementation(name, BUILT_IN, ENTRY_POINTS, field="speculative")
    except ConfigError as error:
        if name in NOT_THERE:
            there = ", ".join(("none", *sorted(BUILT_IN)))
            raise ConfigError(
                f"speculative {name!r} is not there yet (there are: {there})", field="speculative"
            ) from error
        raise
    drafter: Drafter = make(config, executor)
    return drafter
