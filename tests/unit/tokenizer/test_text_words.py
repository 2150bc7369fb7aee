"""Ids of ASCII text, word by word: the library's own ids, for every split rule that is taken; others are not taken."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.scripted import MODEL

from baton.tokenizer import Tokenizer
from baton.tokenizer.words import WordCache, word_pattern

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"gpt2": None, "llama3": LLAMA3, "qwen": QWEN, "o200k": O200K}
ASCII = st.text(st.characters(max_codepoint=127), max_size=300)
WORDS = st.lists(
    st.sampled_from(
        [
            "a",
            "The",
            "iPhone",
            " x",
            "  ",
            "\n",
            "\r\n",
            "\t",
            "'s",
            "'LL",
            "12345",
            "..",
            "/",
            "<|bos|>",
            "_",
            "\x0b",
            "\x1c",
        ]
    ),
    max_size=60,
).map("".join)


def backend_of(pattern: str | None, behavior: str = "isolated") -> tokenizers.Tokenizer:
    """A small byte-level BPE with a split rule; ``None``: that of GPT-2."""
    pre: Any = tokenizers.pre_tokenizers
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    if pattern is not None:
        split = pre.Split(tokenizers.Regex(pattern), behavior)
        backend.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|bos|>"], initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([__doc__ or "", "The iPhone and it's words\n\n  12345 of them\n" * 50], trainer)
    return backend


def words_of(backend: tokenizers.Tokenizer) -> WordCache:
    parts = json.loads(backend.to_str())
    pattern = word_pattern(parts, backend.pre_tokenizer.pre_tokenize_str)
    assert pattern is not None

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    return WordCache(pattern, [token["content"] for token in parts["added_tokens"]], encode)


@pytest.fixture(scope="module", params=["demo", *PATTERNS])
def known(request: pytest.FixtureRequest) -> tuple[tokenizers.Tokenizer, WordCache]:
    backend = MODEL.tokenizer._backend if request.param == "demo" else backend_of(PATTERNS[request.param])
    return backend, words_of(backend)


@given(ASCII | WORDS)
@settings(max_examples=150, deadline=None)
def test_words_give_the_same_ids(known: tuple[tokenizers.Tokenizer, WordCache], text: str) -> None:
    backend, words = known
    expected = backend.encode(text, add_special_tokens=False).ids
    for _ in range(2):  # the second time from what is remembered
        ids = words.encode(text)
        assert ids is None or list(ids) == expected
    assert "<|" in text or ids is not None


def test_what_is_not_ascii_or_has_tokens_of_its_own_is_left_to_the_library(
    known: tuple[tokenizers.Tokenizer, WordCache],
) -> None:
    _, words = known
    assert words.encode("naïve") is None
    assert words.encode("a <|bos|> b") is None
    assert words.encode("") is not None


@pytest.mark.parametrize(
    "pattern",
    [
        r"\p{Han}+|\s+|\S+",
        r"\w+|\W+",
        r"(a)|[^a]+",
        r"^a|.",
        r"[[a-z]&&[^a]]+|.",
        r"\P{L}+|\p{L}+",
        r"(?m:a)|.",
        r"\p{L}{1,3}+|.",
    ],
)
def test_other_split_rules_are_not_taken(pattern: str) -> None:
    backend = backend_of(pattern)
    assert word_pattern(json.loads(backend.to_str()), backend.pre_tokenizer.pre_tokenize_str) is None


def test_rules_that_leave_gaps_are_left_to_the_library() -> None:
    backend = backend_of(r"\p{L}+|\s+|[^\s\p{L}x]+(?=~)")
    parts = json.loads(backend.to_str())
    pattern = word_pattern(parts, backend.pre_tokenizer.pre_tokenize_str)
    assert pattern is None or WordCache(pattern, [], lambda texts: [[] for _ in texts]).encode("a 12") is None


@pytest.mark.parametrize("behavior", ["removed", "merged_with_previous", "contiguous"])
def test_other_ways_to_split_are_not_taken(behavior: str) -> None:
    backend = backend_of(QWEN, behavior)
    assert word_pattern(json.loads(backend.to_str()), backend.pre_tokenizer.pre_tokenize_str) is None


def test_words_of_one_salt_are_not_known_to_another() -> None:
    backend = backend_of(None)
    asked: list[str] = []
    words = words_of(backend)
    encode = words._encode
    words._encode = lambda texts: asked.extend(texts) or encode(texts)  # type: ignore[func-returns-value]
    words.encode("one two", "a")
    words.encode("one two three", "a")
    assert asked == ["one", " two", " three"]
    words.encode("one two", "b")
    assert asked[3:] == ["one", " two"]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.tokenizer.words._MAX_WORDS", 10)
    monkeypatch.setattr("baton.tokenizer.words._MAX_SALTS", 3)
    backend = backend_of(None)
    words = words_of(backend)
    for at in range(30):
        text = f"a b c {chr(97 + at % 26)}{at} " + "x" * 100
        ids = words.encode(text, f"salt {at % 5}")
        assert ids is not None
        assert list(ids) == backend.encode(text, add_special_tokens=False).ids
    assert len(words._known) <= 3
    assert all(len(known) <= 20 for known in words._known.values())
    assert not any(len(word) > 64 for known in words._known.values() for word in known)


def test_a_tokenizer_uses_them() -> None:
    tokenizer = Tokenizer(backend_of(QWEN))
    assert tokenizer._pieces is not None
    assert tokenizer._pieces._words is not None
    text = "words of a text that is longer than a piece " * 40
    assert tokenizer.encode(text, False) == tokenizer._backend.encode(text, add_special_tokens=False).ids
