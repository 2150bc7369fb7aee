"""Finding entries by the tokens they begin with."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from baton.errors import InvalidRequestError
from baton.hashing import as_token_array

Tokens = npt.NDArray[np.uint32]
_DIGEST_BYTES = 16


class Indexed(Protocol):
    """An entry: its number, and the region ``[start, stop)`` of ``tokens`` that it holds."""

    seq: int
    start: int
    stop: int
    tokens: Tokens


E = TypeVar("E", bound=Indexed)


class TokenIndex(Generic[E]):
    """Entries by a digest of all tokens up to their end.

    A look-up digests the query's tokens once, stopping at each length that some entry has: O(tokens + lengths),
    whatever the number of entries.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, bytes], dict[int, E]] = {}
        self._digests: dict[int, bytes] = {}
        self._lengths: Counter[int] = Counter()

    def add(self, entry: E) -> None:
        """Add an entry."""
        digest = next(_prefix_digests(entry.tokens, [entry.stop]))
        self._digests[entry.seq] = digest
        self._entries.setdefault((entry.stop, digest), {})[entry.seq] = entry
        self._lengths[entry.stop] += 1

    def discard(self, entry: E) -> None:
        """Remove an entry, if it is there."""
        digest = self._digests.pop(entry.seq, None)
        if digest is None:
            return
        found = self._entries[entry.stop, digest]
        del found[entry.seq]
        if not found:
            del self._entries[entry.stop, digest]
        self._lengths[entry.stop] -= 1
        if not self._lengths[entry.stop]:
            del self._lengths[entry.stop]

    def find(self, tokens: Tokens, start: int) -> Iterator[E]:
        """Yield entries that hold token ``start`` and whose tokens are a prefix of the query's.

        Those that reach furthest come first, equal ones in order of arrival.
        """
        lengths = sorted(n for n in self._lengths if start < n <= len(tokens))
        digests = _prefix_digests(tokens, lengths)
        for length, digest in reversed(list(zip(lengths, digests, strict=True))):
            for entry in self._entries.get((length, digest), {}).values():
                if matches(entry, tokens, start):
                    yield entry


def matches(entry: Indexed, tokens: Tokens, start: int) -> bool:
    """Return whether an entry holds token ``start`` and depends on nothing but a prefix of ``tokens``."""
    if not entry.start <= start < entry.stop <= len(tokens):
        return False
    return bool(np.array_equal(tokens[: entry.stop], entry.tokens[: entry.stop]))


def _prefix_digests(tokens: Tokens, lengths: list[int]) -> Iterator[bytes]:
    """Yield the digests of ``tokens[:n]`` for each of some ascending lengths, in one pass over the tokens."""
    state, data, at = hashlib.blake2b(digest_size=_DIGEST_BYTES), np.ascontiguousarray(tokens).data, 0
    for length in lengths:
        state.update(data[at:length])
        at = length
        yield state.copy().digest()


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
