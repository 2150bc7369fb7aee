"""A tokenizer of 64 tokens, some of them several letters long, and languages small enough to be written out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.engine.grammar.constraint import GrammarCompiler
from baton.engine.grammar.guidance import GuidanceBackend

VOCAB = 64
EOS = VOCAB - 1
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
MERGES = [("a", "b"), ("ab", "ab"), ("b", "c"), ("c", "a"), ("b", "a"), ("ab", "c"), ("c", "c")]
TEXTS = [*LETTERS, *(left + right for left, right in MERGES)]
"""Of the tokens from 0 on; those behind them stand for nothing."""


def write_tokenizer(folder: Path) -> Path:
    """Write ``tokenizer.json``; returns the folder."""
    names = [*TEXTS, *(f"<unused{i}>" for i in range(EOS - len(TEXTS)))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*names[len(TEXTS) :], "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_compiler(folder: Path) -> GrammarCompiler:
    """Return what compiles grammars for that tokenizer."""
    eos = frozenset({EOS})
    return GrammarCompiler(GuidanceBackend(write_tokenizer(folder), vocab_size=VOCAB, eos_token_ids=eos), eos)


class Language:
    """A finite set of texts; which tokens may come next is found by looking at all of them.

    Args:
        pattern: A regular expression of it.
        texts: The texts.
    """

    def __init__(self, pattern: str, texts: Iterable[str]) -> None:
        self.pattern, self.texts = pattern, frozenset(texts)

    def allowed(self, text: str) -> list[int]:
        """Return the tokens that may follow a text."""
        found = [i for i, more in enumerate(TEXTS) if any(one.startswith(text + more) for one in self.texts)]
        return [*found, EOS] if text in self.texts else found

    def complete(self, text: str) -> bool:
        """Whether nothing can follow but the end."""
        return self.allowed(text) == [EOS]


def _texts(parts: Iterable[str], most: int) -> set[str]:
    found = (itertools.product(tuple(parts), repeat=count) for count in range(1, most + 1))
    return {"".join(each) for group in found for each in group}


LANGUAGES = [
    Language("[abc]{1,3}", _texts("abc", 3)),
    Language("(ab|c){1,4}", _texts(("ab", "c"), 4)),
    Language("x[0-3]?(ba|y)", [f"x{digit}{end}" for digit in ("", "0", "1", "2", "3") for end in ("ba", "y")]),
]
"""Texts in which nothing is forced that could be written with other tokens: see ``forced_tokens``."""


def text_of(token_ids: Iterable[int]) -> str:
    """Return what tokens stand for; that of the end is nothing."""
    return "".join(TEXTS[token] for token in token_ids if token != EOS)
