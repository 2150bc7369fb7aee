"""The stream of text equals the tokenizer's decode, whatever the portions, and never takes a character back."""

from __future__ import annotations

import itertools
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from baton.tokenizer import IncrementalDetokenizer, Tokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "def f(x):\n    return x + 1\n", "naïve café 你好 мир"] * 4
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    [
        "👩‍👩‍👧‍👦 family",
        "e\u0301 combining",
        "日本語テキスト",
        "🇩🇪🏳️‍🌈",
        "tab\tnew\nline  two  spaces ",
        "مرحبا",
        " lead",
    ]
)


def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"]
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<added one>", special=False)])
    return Tokenizer(backend)


def sentencepiece() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁the", "th", "he", "▁t", "qu", "é"]
    merges = [("t", "h"), ("h", "e"), ("▁", "t"), ("▁t", "he"), ("q", "u")]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: at for at, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


def metaspace() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), *((c, -3.0) for c in "abcdeé你")], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


def wordpiece() -> Tokenizer:
    words = ["[UNK]", "the", "quick", "##ing", "##s", "run", "a", "##a"]
    backend = tokenizers.Tokenizer(models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(backend)


def no_scheme() -> Tokenizer:
    """Byte-level BPE, but decoded by the general way."""
    tokenizer = byte_level()
    tokenizer.scheme = None
    return tokenizer


KINDS = {
    "byte_level": byte_level(),
    "sentencepiece": sentencepiece(),
    "metaspace": metaspace(),
    "wordpiece": wordpiece(),
    "general": no_scheme(),
}
EXACT = pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "metaspace", "wordpiece"])


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool = True) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    pieces = []
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    for begin, end in itertools.pairwise(bounds):
        pieces.append(detokenizer.push(ids[begin:end]))
    return "".join(pieces) + detokenizer.flush()


@EXACT
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_equals_decode_for_random_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=60))
    cuts = data.draw(st.lists(st.integers(0, 1000), max_size=60))
    skip = data.draw(st.booleans())
    assert stream(tokenizer, ids, cuts, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "general"])
@given(text=TEXT, one_by_one=st.booleans())
@settings(max_examples=150, deadline=None)
def test_round_trip_of_text(kind: str, text: str, one_by_one: bool) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    cuts = list(range(len(ids))) if one_by_one else []
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)
    if kind != "sentencepiece" or not text.startswith("▁"):  # there the sign itself reads as a space
        assert stream(tokenizer, ids, cuts) == tokenizer.decode(ids)
    if kind == "byte_level" and "<" not in text:
        assert tokenizer.decode(ids) == text


@given(ids=st.lists(st.integers(0, KINDS["byte_level"].vocab_size + 2), max_size=60), skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_bytes_of_tokens_make_the_text(ids: list[int], skip: bool) -> None:
    tokenizer = KINDS["byte_level"]
    shown = [token_id for token_id in ids if not (skip and token_id in tokenizer.special_ids)]
    text = b"".join(tokenizer.token_bytes(token_id) for token_id in shown).decode(errors="replace")
    assert text == tokenizer._backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "general"])
def test_never_a_broken_character(kind: str) -> None:
    tokenizer = KINDS[kind]
    text = "a👩‍👩‍👧‍👦 日本 é ß🏳️‍🌈z"
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)  # characters are spread over tokens
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "general"])
def test_flush_shows_an_unfinished_character(kind: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode("a鼠", add_special_tokens=False)[:-1]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(ids) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_context_keeps_the_space_of_a_continuation() -> None:
    tokenizer = KINDS["sentencepiece"]
    prompt, new = tokenizer.encode("a"), tokenizer.encode("the")
    assert IncrementalDetokenizer(tokenizer).push(new) == "the"
    assert IncrementalDetokenizer(tokenizer, context=prompt).push(new) == " the"


def test_general_decoder_holds_a_bounded_number_of_tokens() -> None:
    tokenizer = KINDS["general"]
    broken = tokenizer.encode("好", add_special_tokens=False)[0]
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(detokenizer.push([broken]) for _ in range(200))
    assert len(text) > 150
    assert len(detokenizer._window._ids) < 32  # type: ignore[union-attr]


def test_schemes_are_recognized() -> None:
    assert {kind: tokenizer.scheme is not None for kind, tokenizer in KINDS.items()} == {
        "byte_level": True,
        "sentencepiece": True,
        "metaspace": False,
        "wordpiece": False,
        "general": False,
    }
    assert json.loads(KINDS["sentencepiece"]._backend.to_str())["decoder"]["type"] == "Sequence"
