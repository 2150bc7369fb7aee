"""Prompt lookup: what followed a sequence's last tokens where they stood before.

Saxena, "Prompt Lookup Decoding" (2023). The longest match wins, among matches of one length the latest one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as SequenceOf

import numpy as np

from baton.config import EngineConfig
from baton.engine.executor.base import Executor
from baton.engine.sequence import Sequence
from baton.engine.speculation.drafter import Proposal
from baton.native import address_of, function

LEAST, MOST = 1, 5
"""Tokens of a match."""

_draft = function("ngram_draft", ctypes.c_int64, *[ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p])


class NgramDrafter:
    """A :class:`~baton.engine.speculation.drafter.Drafter` without any state."""

    name = "ngram"
    sequential = False

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        """Nothing has to be loaded."""

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Proposal]:
        """Return what followed before; see the protocol."""
        return [Proposal(look_up(sequence, limit)) for sequence, limit in wanted]

    def ended(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""


def look_up(sequence: Sequence, limit: int) -> list[int]:
    """Return at most ``limit`` tokens that may follow a sequence's last one."""
    draft = np.empty(max(1, limit), np.uint32)
    count = _draft(address_of(sequence.buffer), sequence.num_tokens, LEAST, MOST, limit, address_of(draft))
    found: list[int] = draft[:count].tolist()
    return found
