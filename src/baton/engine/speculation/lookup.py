"""Drafters that look up earlier text: prompt lookup (``ngram``) and suffix decoding (``suffix``).

``ngram`` (Saxena, "Prompt Lookup Decoding", 2023) proposes what followed the sequence's last tokens earlier in the same
sequence. The longest match wins; among matches of one length the latest one.

``suffix`` (Oliaro et al., "SuffixDecoding", NeurIPS 2025) also searches earlier answers of the same tenant. It keeps
hash chains over a ring of tokens in place of suffix trees, so memory is bounded and the oldest answers are overwritten.
How far a match can be trusted is learnt per match length.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.config import EngineConfig
from baton.engine.executor.base import Executor
from baton.engine.sequence import Sequence
from baton.engine.speculation.drafter import Proposal
from baton.engine.speculation.tree import MAX_NODES, first_path
from baton.native import address_of, function

MIN_MATCH = 1
MAX_MATCH = 5
"""Fewest and most tokens of an n-gram match."""

_draft_ngram = function("ngram_draft", ctypes.c_int64, *[ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p])


class NgramDrafter:
    """A :class:`~baton.engine.speculation.drafter.Drafter` without any state."""

    name = "ngram"
    sequential = False

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        """Nothing has to be loaded."""

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Proposal]:
        return [Proposal(look_up(sequence, limit)) for sequence, limit in wanted]

    def sequence_finished(self, sequence: Sequence) -> None: ...

    def close(self) -> None: ...


def look_up(sequence: Sequence, limit: int) -> list[int]:
    """Return at most ``limit`` tokens that may follow a sequence's last one."""
    draft = np.empty(max(1, limit), np.uint32)
    count = _draft_ngram(
        address_of(sequence.buffer), sequence.num_tokens, MIN_MATCH, MAX_MATCH, limit, address_of(draft)
    )
    token_ids: list[int] = draft[:count].tolist()
    return token_ids


DEPTH = 32
"""Tokens of a match that are looked at."""
SHARED_TOKENS = 1 << 17
"""Tokens of earlier answers that are kept per tenant: 1.3 MiB."""
MOST_TENANTS = 64
"""Tenants whose answers are kept; the one that was not seen for longest goes first."""
CONTEXT = 16
"""Prompt tokens that are kept with an answer, so that its beginning can be found."""
LEAST_CHANCE = 0.05
"""A token is not drafted if it and all before it are right less often."""

_NEWS = 0.02
"""Weight of a draft in what is known of matches of its length."""

_new = function("suffix_new", ctypes.c_void_p, ctypes.c_int64)
_free = function("suffix_free", None, ctypes.c_void_p)
_add = function("suffix_add", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_draft_suffix = function(
    "suffix_draft",
    ctypes.c_int64,
    *[ctypes.c_void_p] * 3,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_double,
    *[ctypes.c_int64] * 3,
    *[ctypes.c_void_p] * 4,
)


class History:
    """Tokens of one or more sequences, in native memory.

    Args:
        capacity: Tokens that it holds at most; a power of two from 4 on.

    Attributes:
        capacity: The same.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.address: int | None = _new(capacity)
        if self.address is None:
            raise MemoryError(f"no memory for a history of {capacity} tokens")

    def add(self, tokens: npt.NDArray[np.uint32], *, apart: bool = False) -> None:
        """Add tokens, contiguous uint32, at the end; ``apart``: they are another sequence's than those before."""
        _add(self.address, address_of(tokens), len(tokens), apart)

    def __del__(self) -> None:
        if getattr(self, "address", None) is not None:
            _free(self.address)


@dataclass(slots=True)
class _Own:
    """What is kept of a sequence: its tokens, how many they are, and its last draft's likeliest path."""

    history: History
    num_tokens: int
    drafted_at: int = 0
    draft: tuple[int, ...] = ()
    length: int = 0


Owner = tuple[str, str]
"""Tenant and cache salt: those who share a prefix cache share earlier answers."""


class SuffixDrafter:
    """A :class:`~baton.engine.speculation.drafter.Drafter` over the tokens of sequences."""

    name = "suffix"
    sequential = False

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        """Nothing has to be loaded."""
        self._own: dict[Sequence, _Own] = {}
        self._shared: OrderedDict[Owner, History] = OrderedDict()
        # What is believed before anything is known: the longer, the better.
        self._trust = np.array([0.0, 0.0, *(1.0 - 0.6 / (n - 0.5) for n in range(2, DEPTH + 1))], np.float32)
        self._width = config.speculative_width
        self._tokens = np.empty(MAX_NODES, np.uint32)
        self._parents = np.empty(MAX_NODES, np.int32)
        self._chances = np.empty(MAX_NODES, np.float32)
        self._length = np.zeros(1, np.int64)

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Proposal]:
        return [self._propose(sequence, limit) for sequence, limit in wanted]

    def _propose(self, sequence: Sequence, limit: int) -> Proposal:
        own = self._own.get(sequence)
        count = sequence.num_tokens
        if own is None or count < own.num_tokens:  # new, or rolled back
            most = sequence.num_prompt + sequence.max_output
            own = self._own[sequence] = _Own(History(1 << max(2, (most - 1).bit_length())), 0)
        elif own.draft:
            self._learn(sequence, own)
        own.history.add(sequence.buffer[own.num_tokens : count])
        own.num_tokens = count
        shared = self._shared.get(_owner(sequence))
        num_drafted = _draft_suffix(
            own.history.address,
            None if shared is None else shared.address,
            address_of(sequence.buffer) + 4 * count,
            count,
            address_of(self._trust),
            LEAST_CHANCE,
            limit,
            self._width,
            min(limit * self._width, MAX_NODES),
            *(address_of(array) for array in (self._tokens, self._parents, self._chances, self._length)),
        )
        tokens = self._tokens[:num_drafted].tolist()
        chances = self._chances[:num_drafted].tolist()
        parents = self._parents[:num_drafted].tolist() if self._width > 1 else None
        path = tokens if parents is None else [tokens[i] for i in first_path(parents)]
        own.drafted_at = count
        own.draft = tuple(path)
        own.length = int(self._length[0])
        return Proposal(tokens, chances, parents=parents)

    def _learn(self, sequence: Sequence, own: _Own) -> None:
        """Compare the last draft with what became of it."""
        came = sequence.buffer[own.drafted_at : sequence.num_tokens].tolist()
        for i, (token, right) in enumerate(zip(own.draft, came, strict=False)):
            at = min(DEPTH, own.length + i)
            self._trust[at] += _NEWS * ((token == right) - self._trust[at])
            if token != right:
                break
        own.draft = ()

    def sequence_finished(self, sequence: Sequence) -> None:
        """Add the answer to its tenant's history."""
        self._own.pop(sequence, None)
        if sequence.num_output < 2:
            return
        owner = _owner(sequence)
        shared = self._shared.pop(owner, None) or History(SHARED_TOKENS)
        self._shared[owner] = shared
        if len(self._shared) > MOST_TENANTS:
            self._shared.popitem(last=False)
        begin = max(0, sequence.num_prompt - CONTEXT, sequence.num_tokens - SHARED_TOKENS // 2)
        shared.add(sequence.buffer[begin : sequence.num_tokens], apart=True)

    def close(self) -> None:
        self._own.clear()
        self._shared.clear()


def _owner(sequence: Sequence) -> Owner:
    request = sequence.group.request
    return "" if request.tenant is None else request.tenant.id, request.cache_salt
