"""Tokenizing a text from its pieces, so that what was tokenized before is not tokenized again.

Prompts repeat: system prompts, documents, and every turn of a conversation before the last. Byte-level BPE splits a
text into words first, and no token reaches over the border of two words. A space between two ASCII letters is such a
border for every split rule in use (checked against the tokenizer at hand), whatever stands around it. So a text is cut
at such places, every few hundred characters counted from its beginning, and the ids of its pieces, put together, are
its ids. Texts with the same beginning have the same pieces up to where they part.

Pieces are kept per salt: nobody can find out by the time it takes what a tenant with another salt has sent.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections.abc import Callable
from typing import Any, Protocol

from baton.token_ids import TokenIds

_BORDER = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_PIECE_CHARS = 256
_MAX_PIECE_CHARS = 4096
"""Longer pieces (text without borders) are not kept."""
_CAPACITY = 16_384
"""Pieces; about a KiB each."""
_PROBE = "It's a test, of two words (and More) x y  z1 a\tb c\n d e-f g_h iJ Kl 3 m n4 o"


def is_cuttable(parts: dict[str, Any], split: Callable[[str], list[tuple[str, tuple[int, int]]]]) -> bool:
    """Whether a tokenizer's ids of a text are those of its pieces.

    Args:
        parts: Its ``tokenizer.json``.
        split: Its pre-tokenizer: the words of a text with their places.
    """
    model = parts.get("model") or {}
    if model.get("type") != "BPE" or model.get("dropout"):
        return False
    if (parts.get("normalizer") or {"type": "NFC"}).get("type") != "NFC":
        return False
    for token in parts.get("added_tokens") or ():
        # Such a token may lie on both sides of a border, or take what stands beyond one to be found.
        if (
            token.get("lstrip")
            or token.get("rstrip")
            or token.get("single_word")
            or _BORDER.search(token["content"] + "a")
        ):
            return False
    steps = parts.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", ()) if steps.get("type") == "Sequence" else [steps]
    if not any(step.get("type") == "ByteLevel" for step in steps):
        return False
    begins = {place[0] for _, place in split(_PROBE)}
    return all(match.start() in begins for match in _BORDER.finditer(_PROBE))


class Words(Protocol):
    """Tokenizes text word by word."""

    def encode(self, text: str, salt: str = "") -> TokenIds | None:
        """Return the ids of a text; ``None``: it takes the library."""


class PieceCache:
    """Ids of pieces of text, the oldest forgotten first. Safe to use from several threads.

    Args:
        encode: Tokenizes texts, without adding special tokens.
        words: Tokenizes what it can, faster.
    """

    def __init__(self, encode: Callable[[list[str]], list[list[int]]], words: Words | None = None) -> None:
        self._encode = encode
        self._words = words
        self._known: dict[tuple[str, str], array[int]] = {}
        self._lock = threading.Lock()

    def encode(self, text: str, salt: str = "") -> TokenIds:
        """Return the ids of a text."""
        pieces = cut(text)
        known = self._known
        found = [known.get((salt, piece)) for piece in pieces]
        if None in found:
            self._fill(pieces, found, salt)
            self._keep(salt, pieces, found)
        out = array("I")
        for ids in found:
            assert ids is not None
            out += ids
        return out

    def _fill(self, pieces: list[str], found: list[array[int] | None], salt: str) -> None:
        """Put in the ids that are missing."""
        if self._words is not None:
            for at, piece in enumerate(pieces):
                if found[at] is None:
                    found[at] = self._words.encode(piece, salt)
        missing = [at for at, ids in enumerate(found) if ids is None]
        if missing:
            for at, ids in zip(missing, self._encode([pieces[at] for at in missing]), strict=True):
                found[at] = array("I", ids)

    def _keep(self, salt: str, pieces: list[str], found: list[array[int] | None]) -> None:
        with self._lock:
            # Not the last one: it ends where the text does, and the next text that begins so goes on.
            for piece, ids in zip(pieces[:-1], found, strict=False):
                if ids is not None and len(piece) <= _MAX_PIECE_CHARS:
                    self._known[salt, piece] = ids
            while len(self._known) > _CAPACITY:
                del self._known[next(iter(self._known))]


def cut(text: str) -> list[str]:
    """Return a text's pieces."""
    pieces, at = [], 0
    while (border := _BORDER.search(text, at + _PIECE_CHARS)) is not None:
        pieces.append(text[at : border.start()])
        at = border.start()
    pieces.append(text[at:])
    return pieces
