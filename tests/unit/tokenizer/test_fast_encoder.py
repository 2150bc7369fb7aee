"""The fast tokenizer gives the library's ids, or is not used."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.scripted import MODEL

from baton.errors import InvalidRequestError
from baton.tokenizer import TextModelCache, Tokenizer
from baton.tokenizer import tokenizer as tokenizer_module

pytest.importorskip("fastokens")

pre: Any = tokenizers.pre_tokenizers
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
UNUSUAL = r"[a-z]+|\d{1,2}|\s+(?!\S)|\s|[^a-z\d\s]+"
CORPUS = "It's the iPhone and WE'LL don't   x\n\n 12345 \u4e2d\u6587 na\u00efve \U0001f600 two others words " * 40
ADDED = (
    tokenizers.AddedToken("<think>", normalized=False),
    tokenizers.AddedToken("<|im_", normalized=False),
    tokenizers.AddedToken(" sp ", normalized=False),
    tokenizers.AddedToken("abc", normalized=True),
    tokenizers.AddedToken("\u00e9<", normalized=True),
    tokenizers.AddedToken("<l>", lstrip=True),
    tokenizers.AddedToken("<r>", rstrip=True),
    tokenizers.AddedToken("sw", single_word=True),
)
PARTS = [
    *(
        "a",
        "def f(x):",
        "The",
        "iPhone",
        " x",
        "  ",
        "   ",
        "\n",
        "\r\n",
        "\t",
        "'s",
        "'LL",
        "'\u017f",
        "12345",
        "..",
        "/",
    ),
    *("<|bos|>", "<|im_start|>", "<|im_end|>", "<|im_", "<think>", "abc", "\u00e9<", "e\u0301<", "<l>", "<r>", " sw "),
    *(
        " sp ",
        "_",
        "\x0b",
        "\x1c",
        "\x85",
        "\xa0",
        "\u3000",
        "\u2028",
        "\u4e2d\u6587",
        "\ud55c\uad6d",
        "\u1112\u1161\u11ab",
    ),
    *("\U0001f600", "\u0663", "\u2163", "\u01c5", "\u212b", "\u0301", "\u200d", "\u0130", "\ufffd", "\u2581", "z" * 17),
    *(" " * 20, "-" * 70),
]
TEXTS = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=12)), max_size=60).map("".join)


def byte_level(pattern: str | None, *, normalizer: Any = None, ignore: bool = False, prefix: bool = False) -> Any:
    """A small byte-level BPE with a split rule; ``None``: that of GPT-2."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=ignore))
    backend.pre_tokenizer = pre.ByteLevel(add_prefix_space=prefix)
    if pattern is not None:
        split = pre.Split(tokenizers.Regex(pattern), "isolated")
        backend.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=prefix, use_regex=False)])
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|bos|>"], initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([CORPUS], trainer)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """A small BPE with byte fallback, as Llama 2 has it."""
    norm: Any = tokenizers.normalizers
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = norm.Sequence([norm.Prepend("\u2581"), norm.Replace(" ", "\u2581")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    backend.train_from_iterator([CORPUS], trainer)
    return backend


def with_added(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    for token in ADDED:
        backend.add_tokens([token])
    return backend


FAST = {
    "demo": lambda: MODEL.tokenizer._backend,
    "gpt2": lambda: byte_level(None),
    "gpt2-prefix": lambda: byte_level(None, prefix=True),
    "llama3": lambda: byte_level(LLAMA3, ignore=True),
    "qwen2": lambda: byte_level(QWEN, normalizer=tokenizers.normalizers.NFC()),
    "o200k": lambda: byte_level(O200K),
    "unusual": lambda: byte_level(UNUSUAL),
    "added": lambda: with_added(byte_level(QWEN, normalizer=tokenizers.normalizers.NFC())),
    "sentencepiece": sentencepiece,
}


def unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram())
    backend.pre_tokenizer = pre.Metaspace()
    backend.train_from_iterator(
        [CORPUS],
        tokenizers.trainers.UnigramTrainer(
            vocab_size=100, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        ),
    )
    return backend


def wordpiece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator([CORPUS], trainer)
    return backend


def metaspace() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator([CORPUS], trainer)
    return backend


@pytest.fixture(scope="module", params=FAST)
def fast(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer = Tokenizer(FAST[request.param]())
    assert tokenizer.encoder == "fastokens"
    return tokenizer


def library_ids(tokenizer: Tokenizer, text: str, special: bool = False) -> list[int]:
    ids: list[int] = tokenizer._backend.encode(text, add_special_tokens=special).ids
    return ids


def assert_equal_ids(tokenizer: Tokenizer, text: str) -> None:
    for special in (True, False):
        expected = library_ids(tokenizer, text, special)
        assert tokenizer.encode(text, special) == expected
        assert tokenizer.encode_array(text, special).tolist() == expected, "when its words are known"


@given(TEXTS)
@settings(max_examples=40, deadline=None)
def test_ids_are_the_librarys(fast: Tokenizer, text: str) -> None:
    assert_equal_ids(fast, text.encode(errors="replace").decode())


@given(TEXTS, TEXTS)
@settings(max_examples=10, deadline=None)
def test_ids_of_a_shared_beginning_are_the_librarys(fast: Tokenizer, beginning: str, end: str) -> None:
    beginning = beginning.encode(errors="replace").decode() * 40
    assert_equal_ids(fast, beginning)
    assert_equal_ids(fast, beginning + end.encode(errors="replace").decode())


@pytest.mark.parametrize(
    "text",
    [
        "x" * 10_000,
        " " * 5_000 + "a",
        "\n" * 5_000,
        "\u4e2d\u6587" * 4_000,
        "e" + "\u0301" * 2_000,
        "<|im_start|>" * 500,
        "<|im_" * 1_000,
        "1" * 5_000,
        "ab'S " * 4_000,
    ],
    ids=lambda text: repr(text[:4]),
)
def test_ids_of_long_runs_are_the_librarys(fast: Tokenizer, text: str) -> None:
    assert fast.encode(text, False) == library_ids(fast, text)


def test_every_character_has_the_librarys_ids(fast: Tokenizer) -> None:
    for at in range(0, 0x110000, 4096):
        codes = (code for code in range(at, at + 4096, 31) if not 0xD800 <= code < 0xE000)
        text = "".join(f"a{chr(code)}b {chr(code)}1\n" for code in codes)
        assert fast.encode(text, False) == library_ids(fast, text), hex(at)


@pytest.mark.parametrize("make", [unigram, wordpiece, metaspace])
def test_tokenizers_it_does_not_take_run_on_the_library(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        tokenizer = Tokenizer(make())
    assert tokenizer.encoder == "tokenizers"
    assert "runs on tokenizers: fastokens does not take it" in caplog.text
    for text in ("", "The iPhone's words", "na\u00efve \U0001f600 " * 200):
        assert tokenizer.encode(text) == library_ids(tokenizer, text, True)


def test_other_ids_are_noticed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A tokenizer that splits digits otherwise, or has no special tokens, or another one's place in a template."""
    import fastokens

    real = fastokens.Tokenizer.from_json_str
    for other in (LLAMA3, O200K, UNUSUAL, None):
        monkeypatch.setattr(tokenizer_module, "_load", lambda _, other=other: real(byte_level(other).to_str()))
        with caplog.at_level(logging.INFO):
            assert Tokenizer(byte_level(QWEN)).encoder == "tokenizers"
        assert "gives other ids for" in caplog.text
        caplog.clear()

    def without_template(content: str) -> Any:
        return real(json.dumps(json.loads(content) | {"post_processor": None}))

    monkeypatch.setattr(tokenizer_module, "_load", without_template)
    assert Tokenizer(byte_level(QWEN)).encoder == "tokenizers"


def test_without_the_package_the_library_does_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fastokens", None)
    with caplog.at_level(logging.INFO):
        tokenizer = Tokenizer(byte_level(QWEN))
    assert tokenizer.encoder == "tokenizers"
    assert "fastokens is not installed" in caplog.text
    assert tokenizer.encode("a b") == library_ids(tokenizer, "a b", True)


def test_a_text_it_cannot_do_is_done_by_the_library(caplog: pytest.LogCaptureFixture) -> None:
    class PanicException(BaseException):  # as a panic in Rust arrives
        pass

    class Failing:
        def encode_batch_flat(self, texts: list[str], special: bool) -> tuple[bytes, bytes]:
            raise errors.pop()

    errors: list[BaseException] = [
        ValueError("match limit"),
        PanicException("index out of bounds"),
        KeyboardInterrupt(),
    ]
    errors.reverse()
    tokenizer = Tokenizer(byte_level(QWEN))
    assert tokenizer._fast is not None
    tokenizer._fast._fast = Failing()  # type: ignore[assignment]
    for failures in (1, 2):
        assert tokenizer.encode("some words") == library_ids(tokenizer, "some words", True)
        assert tokenizer._fast.failures == failures
    assert caplog.text.count("is tokenized by tokenizers") == 1, "a client could flood the log"
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("some words")


@pytest.mark.parametrize("make", [FAST["demo"], wordpiece])
@pytest.mark.parametrize("text", ["\ud800", "a" * 2000 + "\udfff"])
def test_a_lone_surrogate_is_a_clear_error(make: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate") as caught:
        Tokenizer(make()).encode(text)
    assert caught.value.field == "prompt"


def test_no_cache_of_whole_texts() -> None:
    tokenizer = MODEL.tokenizer
    assert tokenizer._fast is not None
    assert tokenizer._fast._fast.segment_cache_stats() is None


def test_several_threads_at_once() -> None:
    tokenizer = Tokenizer(byte_level(QWEN))
    source = Path(__file__).read_text()
    texts = [source[at : at + 3000] for at in range(0, 9000, 1000)]
    expected = [library_ids(tokenizer, text) for text in texts]
    wrong: list[int] = []

    def work(first: int) -> None:
        for at in range(first, first + 40):
            if tokenizer.encode(texts[at % len(texts)], False) != expected[at % len(texts)]:
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert not wrong


def test_the_probe_is_the_same_every_time() -> None:
    parts = json.loads(MODEL.tokenizer._backend.to_str())
    first = list(tokenizer_module.probe_texts(parts))
    assert first == list(tokenizer_module.probe_texts(parts))
    assert any("<|im_end|>" in text for text in first)
    assert 10_000 < sum(map(len, first)) < 100_000


async def test_slow_tokenizers_are_counted(tmp_path: Path) -> None:
    cache = TextModelCache()
    await cache.get("models/baton-tiny")
    assert cache.num_slow == 0
    wordpiece().save(str(tmp_path / "tokenizer.json"))
    await cache.get(str(tmp_path))
    assert cache.num_slow == 1
