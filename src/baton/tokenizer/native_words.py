"""Tokenizing text word by word in C, with the words' ids remembered.

What :mod:`baton.tokenizer.words` does, ten times as fast, and for texts that are not ASCII too: the split rule is an
automaton (:mod:`baton.tokenizer.split_table`), tokens that stand in the text by their names are found, and words are
looked
up in a hash table. A word that is not in it is merged of its bytes. The ids of beginnings that texts share (system
prompts, conversations so far) are remembered whole. Whatever is not surely what the library would do is left to the
library: rules that are not read, the rarest and newest characters, very long words.
"""

from __future__ import annotations

import ctypes
import functools
import secrets
import threading
import time
from array import array
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from baton.native import COMPILERS, address_of, load_helper
from baton.tokenizer.added_tokens import TokenTree, token_tree
from baton.tokenizer.split_rule import split_source
from baton.tokenizer.split_table import CHARACTERS, END, SplitTable, split_table
from baton.tokenizer.token_bytes import byte_level_chars

if TYPE_CHECKING:
    import tokenizers

    from baton.token_ids import TokenIds

_DONE, _MORE = 0, 1
_MAX_WORDS = 32_768
"""Per salt."""
_MAX_BYTES = 2**21
"""Per salt, beside 16 to 32 bytes per word; most words take a record of 32."""
_RECORD_BYTES = 32
_MAX_SALTS = 64
_MAX_IDS = 16_384
"""What is done in one call, with the interpreter's lock held: some hundred microseconds of work."""
_MAX_BYTES_OF_TEXT = 2**31 - 1
_PROGRESS = 6
"""Numbers that say how far a text is, before those that say where its ids go."""
_AT_THE_BEGINNING = array("Q", bytes(8 * _PROGRESS))
_MAX_KEPT = 64
"""Bytes of a word that is remembered, as words.c has it."""
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
_BYTE_CHARS = byte_level_chars()
_PROBE = (
    "It's WE'LL don't, of  two\twords (and More) x y  z1 a\tb c\n d e-f\r\n\r\n  g_h iJ Kl 3 12345 n4 o... !? "
    "\n\n  \v\f /a\n/ \u00e4\u00df\u4e2d\u6587 \u0663\u2163 \u00a0\u3000'\u017f \U0001f600 \u01c5"
)


class _Rule(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("moves", "pages", "classes", "ascii", "roots", "nodes", "edges")),
        *((name, ctypes.c_void_p) for name in ("merges", "whole")),
        *((name, ctypes.c_uint32) for name in ("start", "stride", "end_class", "characters", "only", "longest")),
        ("longest_whole", ctypes.c_uint32),
    )


class NativeWords:
    """Ids of words, per salt: nobody can find out by the time it takes what a tenant with another salt has sent.

    Safe to use from several threads: what is shared is only looked at and changed with the interpreter's lock held.

    Args:
        table: The split rule.
        tokens: Tokens that are found in a text before words are.
        merges: What makes words of bytes.
        library: The helper in C.
    """

    def __init__(self, table: SplitTable, tokens: TokenTree, merges: _Merges, library: Any) -> None:
        stride = table.moves.shape[1]
        ascii_moves = np.ascontiguousarray(table.classes[0, :128] * np.uint32(stride))
        self._kept_alive = table, tokens, ascii_moves, merges
        self._rule = _Rule(
            address_of(table.moves),
            address_of(table.pages),
            address_of(table.classes),
            address_of(ascii_moves),
            *(part.buffer_info()[0] for part in (tokens.roots, tokens.nodes, tokens.edges)),
            merges.address,
            merges.whole.address,
            table.start,
            stride,
            END,
            CHARACTERS,
            tokens.only,
            tokens.longest,
            merges.longest_whole,
        )
        self._rule_pointer = ctypes.pointer(self._rule)
        self._library = library
        self._encode = library.baton_words_encode
        self._known: dict[str, _Table] = {}
        self._making = threading.Lock()

    def encode(self, text: str, salt: str = "") -> TokenIds | None:
        """Return the ids of a text; ``None``: it takes the library.

        Args:
            text: Any text without lone surrogates.
            salt: Whose text it is.
        """
        data = text.encode()
        if len(data) > _MAX_BYTES_OF_TEXT:
            return None
        table = self._known.get(salt) or self._new(salt)
        scratch = _scratch()
        progress = scratch.progress
        progress[:_PROGRESS] = _AT_THE_BEGINNING
        ids: TokenIds | None = None
        while True:
            result = self._encode(self._rule_pointer, table.pointer, data, len(data), scratch.pointer)
            if result not in (_DONE, _MORE):
                return None
            new = scratch.out[: progress[1]]
            ids = new if ids is None else ids + new
            if result == _DONE:
                return ids
            progress[1] = 0
            time.sleep(0)  # let other threads have the interpreter

    def remembered(self, text: str, salt: str = "") -> int:
        """Return how many bytes of a text are known to begin others of this salt."""
        table, data, out = self._known.get(salt), text.encode(), _scratch().out
        return self._library.baton_words_remembered(table.address, data, len(data), *out.buffer_info()) if table else 0

    def _new(self, salt: str) -> _Table:
        with self._making:
            while len(self._known) >= _MAX_SALTS:
                del self._known[next(iter(self._known))]
            return self._known.setdefault(salt, _Table(self._library, _MAX_WORDS, _MAX_BYTES))


class _Table:
    """A table from words to ids; full, it begins anew."""

    def __init__(self, library: Any, most_words: int, most_bytes: int) -> None:
        self._library = library
        seeds = secrets.randbits(64), secrets.randbits(64)
        self.address: int | None = library.baton_words_new(*seeds, most_words, most_bytes // _RECORD_BYTES)
        if self.address is None:
            raise MemoryError("no memory for words")
        self.pointer = ctypes.c_void_p(self.address)

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self._library.baton_words_free(self.address)

    def __len__(self) -> int:
        return int(self._library.baton_words_count(self.address))

    def add(self, word: bytes, ids: array[int]) -> None:
        """Remember a word, if it is not too long for that."""
        if self._library.baton_words_add(self.address, word, len(word), *ids.buffer_info()):
            raise MemoryError("no memory for words")


class _Merges:
    """What a model makes words of.

    Args:
        library: The helper in C.
        lefts: Ids of the left halves of its merges, in the order of their ranks.
        rights: Of the right halves.
        ids: Of what they make.
        singles: Of the single bytes.
    """

    def __init__(
        self, library: Any, lefts: array[int], rights: array[int], ids: array[int], singles: array[int]
    ) -> None:
        self._library = library
        lists = (part.buffer_info()[0] for part in (lefts, rights, ids))
        self.address: int | None = library.baton_merges_new(*lists, len(ids), singles.buffer_info()[0])
        if self.address is None:
            raise MemoryError("no memory for merges")
        self.whole = _Table(library, 2**24, 2**28)
        self.longest_whole = 0

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self._library.baton_merges_free(self.address)

    def word(self, word: bytes) -> list[int]:
        """Return what a word of 1 to 1024 bytes is merged to."""
        out = (ctypes.c_uint32 * len(word))()
        return list(out[: self._library.baton_merges_word(self.address, word, len(word), out)])

    def add_whole(self, vocabulary: dict[str, int]) -> bool:
        """Take all of a vocabulary as one token each, whatever they are merged to. Returns whether that can be done."""
        chars = frozenset(_BYTE_CHARS)
        spelt = [word for word in vocabulary if word and chars.issuperset(word)]  # no text has others
        text = "".join(spelt).translate({ord(char): byte for byte, char in enumerate(_BYTE_CHARS)}).encode("latin-1")
        sizes, ids = array("I", map(len, spelt)), array("I", map(vocabulary.__getitem__, spelt))
        out = array("I", bytes(4 * len(spelt)))
        lists = sizes.buffer_info()[0], ids.buffer_info()[0], len(spelt), out.buffer_info()[0]
        astray = out[: self._library.baton_merges_astray(self.address, text, *lists)]
        begins = list(accumulate(sizes, initial=0))
        for at in astray:
            if sizes[at] > _MAX_KEPT:
                self.longest_whole = max(self.longest_whole, sizes[at])
            else:
                self.whole.add(text[begins[at] : begins[at + 1]], ids[at : at + 1])
        return len(self.whole) == sum(sizes[at] <= _MAX_KEPT for at in astray)


def _merges(model: dict[str, Any], library: Any) -> _Merges | None:
    """Return what makes words as a model does; ``None``: that is not known."""
    vocabulary: dict[str, int] = model.get("vocab") or {}
    if not all(char in vocabulary for char in _BYTE_CHARS) or any(model.get(name) for name in ("dropout", *_AFFIXES)):
        return None
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges") or ()]
    try:
        lefts, rights = (array("I", [vocabulary[pair[side]] for pair in pairs]) for side in (0, 1))
        ids = array("I", [vocabulary["".join(pair)] for pair in pairs])
    except KeyError:  # two words of one id: the library writes one of them
        return None
    merges = _Merges(library, lefts, rights, ids, array("I", [vocabulary[char] for char in _BYTE_CHARS]))
    return None if model.get("ignore_merges") and not merges.add_whole(vocabulary) else merges


def native_words(parts: dict[str, Any], backend: tokenizers.Tokenizer) -> NativeWords | None:
    """Return what tokenizes words as a tokenizer does; ``None``: that is not known, or there is no compiler.

    Args:
        parts: Its ``tokenizer.json``, of a byte-level BPE.
        backend: It.
    """
    library = _library()
    source = split_source(parts.get("pre_tokenizer") or {})
    normalizer = parts.get("normalizer")
    if library is None or source is None or (normalizer is not None and normalizer.get("type") != "NFC"):
        return None
    tokens = token_tree(parts.get("added_tokens") or [])
    table = None if tokens is None else split_table(source, composes=normalizer is not None)
    if tokens is None or table is None:
        return None
    split = backend.pre_tokenizer.pre_tokenize_str(_PROBE)
    if [_PROBE[begin:end] for _, (begin, end) in split] != table.words(_PROBE):
        return None
    merges = _merges(parts.get("model") or {}, library)
    return None if merges is None else NativeWords(table, tokens, merges, library)


_own = threading.local()


class _Scratch:
    """Where ids are written, and a text's progress, which knows where."""

    __slots__ = ("out", "pointer", "progress")

    def __init__(self) -> None:
        self.out = array("I", bytes(4 * _MAX_IDS))
        self.progress = _AT_THE_BEGINNING + array("Q", (self.out.buffer_info()[0], _MAX_IDS))
        self.pointer = ctypes.c_void_p(self.progress.buffer_info()[0])


def _scratch() -> _Scratch:
    """Return what is this thread's until it asks again."""
    try:
        found: _Scratch = _own.scratch
    except AttributeError:
        found = _own.scratch = _Scratch()
    return found


@functools.cache
def _library(compilers: tuple[str, ...] = COMPILERS) -> Any | None:
    """Return the helper in C; the first call waits for the compiler."""
    found = load_helper(Path(__file__).with_name("words.c"), compilers)
    if found is None:
        return None
    # Called with the interpreter's lock held, which is what keeps the tables whole.
    library: Any = ctypes.PyDLL("words", handle=found._handle)
    pointer, size, word, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_char_p
    for name, result, *arguments in (
        ("words_new", pointer, word, word, word, word),
        ("words_free", None, pointer),
        ("words_count", word, pointer),
        ("words_remembered", word, pointer, text, size, pointer, size),
        ("words_add", ctypes.c_int, pointer, text, size, pointer, size),
        ("merges_new", pointer, pointer, pointer, pointer, ctypes.c_uint32, pointer),
        ("merges_free", None, pointer),
        ("merges_word", size, pointer, text, size, pointer),
    ):
        function = getattr(library, f"baton_{name}")
        function.restype, function.argtypes = result, arguments
    # Without the lock: it takes a tenth of a second, and changes nothing that others see.
    astray = library.baton_merges_astray = found.baton_merges_astray
    astray.restype, astray.argtypes = size, [pointer, text, pointer, pointer, size, pointer]
    # encode is called with pointers, bytes and a C int, which need no types: to convert them takes longer.
    return library
