"""Tokenizing ASCII text word by word in Python, with the words' ids remembered.

Byte-level BPE splits a text by a regular expression and gives every word its ids by itself, so a text's ids are its
words' ids, put together. Most words of a text were met before, and Python finds and looks them up in a quarter of the
time that the library takes. (Where a compiler is, :mod:`baton.tokenizer.native_words` does it in C, for the rules
that it
reads.) The library's expression speaks of Unicode's categories, which Python's does not know; for text that is ASCII
alone each of them is a set of ASCII characters, and the expressions then say the same. Whatever is not surely the same
is left to the library: other characters, texts with tokens that are found before words are, expressions with categories
that are not in the table, words that would be split again if they stood alone.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from typing import Any

from baton.tokenizer.split_rule import split_source

_ASCII = {
    "L": "A-Za-z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "Lt": "",
    "Lm": "",
    "Lo": "",
    "M": "",
    "N": "0-9",
    "Nd": "0-9",
    "Nl": "",
    "No": "",
}
"""The ASCII characters of Unicode's categories, as a part of a set."""
_CATEGORY = re.compile(r"\\p\{(\w+)\}")
_PLAIN = re.compile(r"\\[srntdS'\\.\-/?*+|(){}\[\]]|\(\?(?:i?:|!|=|<=|<!)|\(\??|[^\\]", re.DOTALL)
"""A character, an escape, or the beginning of a group, of those that mean the same to both."""
_PROBE = (
    "It's WE'LL don't, of  two\twords (and More) x y  z1 a\tb c\n d e-f\r\n\r\n  g_h iJ Kl 3 12345 n4 o... !? "
    "\n\n  \v\f /a\n/ x"
)
_MAX_WORD_CHARS = 64
_MAX_WORDS = 32_768
"""Per salt; some 150 bytes each."""
_MAX_SALTS = 64


Split = Callable[[str], list[tuple[str, tuple[int, int]]]]


def word_pattern(parts: dict[str, Any], split: Split) -> re.Pattern[str] | None:
    """Return the expression that splits ASCII text into words as a tokenizer does; ``None``: that is not known.

    Args:
        parts: Its ``tokenizer.json``.
        split: Its pre-tokenizer: the words of a text with their places.
    """
    if (parts.get("normalizer") or {"type": "NFC"}).get("type") != "NFC":  # which changes no ASCII
        return None
    source = split_source(parts.get("pre_tokenizer") or {})
    translated = None if source is None else _translate(source)
    if translated is None:
        return None
    try:
        pattern = re.compile(translated, re.ASCII)
    except re.error:
        return None
    if pattern.groups or [place for _, place in split(_PROBE)] != [word.span() for word in pattern.finditer(_PROBE)]:
        return None
    return pattern


def _translate(source: str) -> str | None:
    """Return an expression with sets of ASCII characters for Unicode's categories; ``None``: it has others.

    What the two kinds of expressions may see otherwise is refused: anchors, flags, sets of sets.
    """
    out: list[str] = []
    at, in_set = 0, False
    while at < len(source):
        category = _CATEGORY.match(source, at)
        plain = None if category is not None else _PLAIN.match(source, at)
        if category is not None:
            chars = _ASCII.get(category[1])
            if chars is None or not (chars or in_set):
                return None
            if chars:
                out.append(chars if in_set else f"[{chars}]")
            at = category.end()
            continue
        if plain is None:
            return None
        piece = plain[0]
        if (piece == "[" and in_set) or (piece in ("(", "(?") and not in_set) or (piece in "^$" and out[-1:] != ["["]):
            return None
        if piece == "]" and out[-1:] in (["["], ["^"]):
            return None  # nothing is left of the set
        in_set = (in_set or piece == "[") and piece != "]"
        out.append(piece)
        at = plain.end()
    translated = "".join(out)
    return None if "&&" in translated or "}+" in translated else translated


class WordCache:
    """Ids of words, per salt: nobody can find out by the time it takes what a tenant with another salt has sent.

    Args:
        pattern: Splits a text into words; see :func:`word_pattern`.
        added: Tokens that are found in a text before words are.
        encode: Tokenizes texts, without adding special tokens.
    """

    def __init__(
        self, pattern: re.Pattern[str], added: list[str], encode: Callable[[list[str]], list[list[int]]]
    ) -> None:
        self._split = pattern.findall
        self._added = re.compile("|".join(map(re.escape, added))) if added else None
        self._encode = encode
        self._known: dict[str, dict[str, bytes]] = {}

    def encode(self, text: str, salt: str = "") -> array[int] | None:
        """Return the ids of a text; ``None``: it takes the library."""
        if not text.isascii() or (self._added is not None and self._added.search(text) is not None):
            return None
        words = self._split(text)
        if "".join(words) != text:  # something lies between them
            return None
        known = self._known.get(salt)
        if known is None:
            known = self._new(salt)
        try:
            return array("I", b"".join(map(known.__getitem__, words)))
        except KeyError:
            return self._learn(text, words, known)

    def _learn(self, text: str, words: list[str], known: dict[str, bytes]) -> array[int] | None:
        """Have the words tokenized that are new."""
        new = [word for word in dict.fromkeys(words) if word not in known]
        if any(self._split(word) != [word] for word in new):
            return None
        learnt = {word: array("I", ids).tobytes() for word, ids in zip(new, self._encode(new), strict=True)}
        if len(known) + len(new) > _MAX_WORDS:
            known.clear()
        known.update((word, ids) for word, ids in learnt.items() if len(word) <= _MAX_WORD_CHARS)
        return array("I", b"".join([known.get(word) or learnt.get(word) or self._again(word) for word in words]))

    def _again(self, word: str) -> bytes:
        """Return the ids of a word that was known until a moment ago."""
        return array("I", self._encode([word])[0]).tobytes()

    def _new(self, salt: str) -> dict[str, bytes]:
        while len(self._known) >= _MAX_SALTS:
            self._known.pop(next(iter(self._known)), None)
        return self._known.setdefault(salt, {})
