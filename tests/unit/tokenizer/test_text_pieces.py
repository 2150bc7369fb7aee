"""Ids put together from pieces are the tokenizer's own ids."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.scripted import MODEL

from baton.tokenizer import Tokenizer
from baton.tokenizer.pieces import cut, is_cuttable

WORDS = st.sampled_from(
    [
        "a",
        "def",
        "x y",
        "  ",
        "\n",
        "\t",
        "don't",
        " it's",
        "_",
        "Ünïcode",
        "日本",
        "e\u0301 a",
        "1 2",
        "a 1",
        "<|eos|>",
        ". B",
    ]
)
TEXTS = st.lists(st.one_of(WORDS, st.text(max_size=12)), min_size=200, max_size=700).map(" ".join)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def byte_level(pattern: str | None) -> tokenizers.Tokenizer:
    """A small byte-level BPE, trained on this repository's own words."""
    pre: Any = tokenizers.pre_tokenizers
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    if pattern is None:
        backend.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    else:
        split = pre.Split(tokenizers.Regex(pattern), "isolated")
        backend.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.normalizer = tokenizers.normalizers.NFC()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|bos|>"], initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([__doc__ or "", "a word and another word, two words more\n" * 50], trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return backend


@pytest.fixture(scope="module", params=["demo", "gpt2", "llama3"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "demo":
        tokenizer = Tokenizer(MODEL.tokenizer._backend)
    else:
        tokenizer = Tokenizer(byte_level(LLAMA3 if request.param == "llama3" else None))
    tokenizer._words = None  # which would not cut a text
    return tokenizer


@given(TEXTS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_pieces_give_the_same_ids(tokenizer: Tokenizer, text: str, special: bool) -> None:
    text = encodable(text)
    assert tokenizer._pieces is not None
    expected = tokenizer._backend.encode(text, add_special_tokens=special).ids
    assert tokenizer.encode(text, special) == expected
    assert tokenizer.encode(text, special) == expected, "from what is remembered"
    longer = text + " and more words " * 40
    assert tokenizer.encode(longer, special) == tokenizer._backend.encode(longer, add_special_tokens=special).ids


def test_a_shared_beginning_is_tokenized_once() -> None:
    seen: list[str] = []
    tokenizer = Tokenizer(byte_level(None))
    assert tokenizer._pieces is not None
    tokenizer._words = tokenizer._pieces._words = None  # which know more than pieces
    encode = tokenizer._pieces._encode
    tokenizer._pieces._encode = lambda texts: seen.extend(texts) or encode(texts)  # type: ignore[func-returns-value]
    beginning = "two words and some more of them " * 100
    tokenizer.encode(beginning + "first")
    before, seen[:] = sum(map(len, seen)), []
    assert before == len(beginning) + 5
    tokenizer.encode(beginning + "second")
    assert sum(map(len, seen)) < 600
    seen.clear()
    tokenizer.encode(beginning + "second", salt="another tenant")
    assert sum(map(len, seen)) == len(beginning) + 6


def test_pieces_are_the_text() -> None:
    text = "a b " * 1000
    assert "".join(cut(text)) == text
    assert len(cut(text)) > 10
    assert cut("x" * 10_000) == ["x" * 10_000]


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Metaspace"}},
        {"model": {"type": "Unigram"}},
        {"added_tokens": [{"content": "<a>", "lstrip": True}]},
        {"added_tokens": [{"content": "<two words>"}]},
        {"added_tokens": [{"content": "two "}]},
        {"added_tokens": [{"content": " two", "single_word": True}]},
    ],
)
def test_others_are_left_whole(change: dict[str, Any]) -> None:
    backend = byte_level(None)
    parts: dict[str, Any] = {"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}}
    split = backend.pre_tokenizer.pre_tokenize_str
    assert is_cuttable(parts, split)
    assert not is_cuttable({**parts, **change}, split)


def test_a_split_rule_that_keeps_words_together_is_noticed() -> None:
    backend = byte_level(r"[^\n]+|\n")
    parts = {"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}}
    assert not is_cuttable(parts, backend.pre_tokenizer.pre_tokenize_str)
    assert Tokenizer(backend)._pieces is None
