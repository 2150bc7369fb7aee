"""Finding entries by the tokens they begin with: rolling hashes to find, a full comparison to be sure.

A query's hash of every prefix is made in one vectorised pass; then each length that some entry has costs one dictionary
look-up. So a look-up takes O(tokens + different lengths), not O(entries * tokens).
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from baton.errors import InvalidRequestError
from baton.hashing import as_token_array

Tokens = npt.NDArray[np.uint32]


class PrefixHasher:
    """Polynomial hashes modulo 2^64 under a secret, so that nobody can aim at collisions; hints, never proof."""

    def __init__(self) -> None:
        self._key = np.uint64(secrets.randbits(64))
        self._base = np.uint64(secrets.randbits(64) | 1)
        self._powers = np.ones(1, dtype=np.uint64)

    def prefixes(self, tokens: Tokens) -> npt.NDArray[np.uint64]:
        """Return the hashes of ``tokens[:0]`` to ``tokens[:n]``: uint64 [n + 1]."""
        out = np.zeros(len(tokens) + 1, dtype=np.uint64)
        np.cumsum(self._terms(tokens), out=out[1:])
        return out

    def whole(self, tokens: Tokens) -> int:
        """Return the hash of all tokens."""
        return int(self._terms(tokens).sum(dtype=np.uint64))

    def _terms(self, tokens: Tokens) -> npt.NDArray[np.uint64]:
        count = len(tokens)
        while len(self._powers) < count:
            step = self._powers[-1:] * self._base
            self._powers = np.concatenate((self._powers, self._powers * step))
        mixed = tokens.astype(np.uint64) ^ self._key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (mixed ^ (mixed >> np.uint64(31))) * self._powers[:count]


class Indexed(Protocol):
    """What the index holds: something with a number, whose region begins with some tokens."""

    seq: int
    start: int
    stop: int
    tokens: Tokens
    prefix_hash: int


E = TypeVar("E", bound=Indexed)


@dataclass(eq=False)
class TokenQuery:
    """Tokens of a consumer, and the first token it wants.

    Attributes:
        tokens: uint32 [n].
        start: Index of the first token wanted.
        hashes: uint64 [n + 1], of every prefix.
    """

    tokens: Tokens
    start: int
    hashes: npt.NDArray[np.uint64]

    def matches(self, entry: Indexed) -> bool:
        """Whether the entry holds the token wanted, and everything up to its end is what this consumer has."""
        if not entry.start <= self.start < entry.stop or entry.stop > len(self.tokens):
            return False
        if int(self.hashes[entry.stop]) != entry.prefix_hash:
            return False
        return bool(np.array_equal(self.tokens[: entry.stop], entry.tokens[: entry.stop]))


class PrefixIndex(Generic[E]):
    """Entries by (length, hash) of the tokens up to their end; entries are hashed when a query first needs it."""

    def __init__(self) -> None:
        self.hasher = PrefixHasher()
        self._fresh: dict[int, E] = {}
        self._entries: dict[tuple[int, int], dict[int, E]] = {}
        self._lengths: Counter[int] = Counter()

    def query(self, tokens: Tokens, start: int) -> TokenQuery:
        """Prepare a query."""
        return TokenQuery(tokens, start, self.hasher.prefixes(tokens))

    def add(self, entry: E) -> None:
        """Add an entry."""
        self._fresh[entry.seq] = entry

    def remove(self, entry: E) -> None:
        """Remove an entry."""
        if self._fresh.pop(entry.seq, None) is not None:
            return
        key = (entry.stop, entry.prefix_hash)
        found = self._entries[key]
        del found[entry.seq]
        if not found:
            del self._entries[key]
        self._lengths[entry.stop] -= 1
        if not self._lengths[entry.stop]:
            del self._lengths[entry.stop]

    def hash_fresh(self) -> None:
        """Hash the entries that no query has met yet."""
        for entry in self._fresh.values():
            entry.prefix_hash = self.hasher.whole(entry.tokens[: entry.stop])
            self._entries.setdefault((entry.stop, entry.prefix_hash), {})[entry.seq] = entry
            self._lengths[entry.stop] += 1
        self._fresh.clear()

    def find(self, query: TokenQuery) -> Iterator[E]:
        """Yield matching entries, those that reach furthest first, equal ones in order of arrival."""
        self.hash_fresh()
        lengths = sorted((n for n in self._lengths if query.start < n <= len(query.tokens)), reverse=True)
        for length in lengths:
            for entry in list(self._entries.get((length, int(query.hashes[length])), {}).values()):
                if query.matches(entry):
                    yield entry


def region(roi: slice | None, num_tokens: int) -> tuple[int, int]:
    """Read a region of interest: (start, stop) within the tokens; ``None``: all of them.

    Raises:
        InvalidRequestError: It has a step, or lies outside.
    """
    if roi is None:
        return 0, num_tokens
    start = 0 if roi.start is None else roi.start
    stop = num_tokens if roi.stop is None else roi.stop
    if roi.step not in (None, 1) or not 0 <= start <= stop <= num_tokens:
        raise InvalidRequestError(f"roi {roi} does not lie within {num_tokens} tokens", field="roi")
    return start, stop


def token_array(tokens: npt.ArrayLike) -> Tokens:
    """Return tokens as uint32 [n], without a copy where they are.

    Raises:
        InvalidRequestError: They are not a list of token ids.
    """
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequestError("tokens must be a list of token ids", field="tokens")
    if array.dtype != np.uint32 and array.size and (int(array.min()) < 0 or int(array.max()) >= 1 << 32):
        raise InvalidRequestError("a token id is not in [0, 2^32)", field="tokens")
    return as_token_array(array)
