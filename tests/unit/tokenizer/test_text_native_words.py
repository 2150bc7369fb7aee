"""Ids of text, word by word in C: always the library's own ids; what is not surely the same is left to the library."""

from __future__ import annotations

import array
import ctypes
import json
import random
import sys
import threading
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.scripted import MODEL
from tests.unit.tokenizer.test_text_words import PATTERNS, QWEN, backend_of

from baton.tokenizer import Tokenizer, native_words
from baton.tokenizer.native_words import NativeWords
from baton.tokenizer.split_rule import GPT2, read_rule
from baton.tokenizer.split_table import CHARACTERS, SplitTable, split_table
from baton.tokenizer.words import WordCache

pytestmark = pytest.mark.skipif(native_words._library() is None, reason="no compiler")

QWEN35 = QWEN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
RULES = {name: pattern or GPT2 for name, pattern in PATTERNS.items()} | {"qwen3.5": QWEN35}
KNOWN = st.characters(max_codepoint=CHARACTERS - 1, exclude_categories=["Cs"])
TRICKY = st.sampled_from(
    [
        *(
            "a",
            "The",
            "iPhone",
            "ABCde",
            " x",
            "def f(x):",
            "return",
            "_",
            "==",
            "/",
            "..",
            "'s",
            "'LL",
            "'\u017f",
            "'",
        ),
        *(" ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1c", "\x85", "\u00a0", "\u2028", "\u3000", "\u200b", "    "),
        *("1", "12345", "\u0663", "\u2163", "\u00bd", "\u0967"),
        *("na\u00efve", "\u00c4", "\u4e2d\u6587", "\u01c5", "\u02b0", "\u00aa", "e\u0301", "\u0345", "\u1100\u1161"),
        *("\U0001f600", "\U0001f469\u200d\U0001f467", "\ufe0f", "\u2019s", "\u212a", "\ufb06", "\x00", "\U00020000"),
        *("<|bos|>", "<|bos|", "<|", "<", "<think>", "</think>", "word word"),
    ]
)
TEXTS = st.lists(TRICKY | st.text(max_size=8), max_size=60).map("".join) | st.text(max_size=100)


def with_tokens(backend: tokenizers.Tokenizer, **options: bool) -> tokenizers.Tokenizer:
    names = ("<think>", "</think>", "<|", "<|bos|>\n")
    backend.add_tokens([tokenizers.AddedToken(name, **{"normalized": False, **options}) for name in names])
    return backend


def words_of(backend: tokenizers.Tokenizer) -> NativeWords | None:
    return native_words.native_words(json.loads(backend.to_str()), backend)


def known_words(backend: tokenizers.Tokenizer) -> NativeWords:
    words = words_of(backend)
    assert words is not None
    return words


def library_ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


@pytest.fixture(scope="module", params=["demo", *RULES, "nfc"])
def both(request: pytest.FixtureRequest) -> tuple[tokenizers.Tokenizer, NativeWords]:
    if request.param == "demo":
        backend = MODEL.tokenizer._backend
    elif request.param == "nfc":
        backend = with_tokens(backend_of(QWEN))
        backend.normalizer = tokenizers.normalizers.NFC()
    else:
        backend = with_tokens(backend_of(RULES[request.param]))
    return backend, known_words(backend)


@given(TEXTS)
@example("<|<|bos|><|bos|>\n<think></think>")
@example("'\u017f it'S")
@example("x" * 64 + " " + "y" * 65 + " " + "z" * 1025)
@settings(max_examples=200, deadline=None)
def test_words_give_the_librarys_ids(both: tuple[tokenizers.Tokenizer, NativeWords], text: str) -> None:
    backend, words = both
    text = text.encode(errors="replace").decode()
    expected = library_ids(backend, text)
    for _ in range(2):  # the second time from what is remembered
        ids = words.encode(text)
        assert ids is None or list(ids) == expected
    if backend.normalizer is None and len(text) <= 1000 and all(ord(char) < CHARACTERS for char in text):
        assert ids is not None


@pytest.mark.parametrize("character", ["a", "\u00e9", "\u4e2d", "\U00010428"])
def test_words_as_long_as_are_merged_and_a_little_longer(
    both: tuple[tokenizers.Tokenizer, NativeWords], character: str
) -> None:
    """Nothing is merged behind the room for a word, wherever its last character begins."""
    backend, words = both
    for count in range(1018, 1030):
        for word in ("a" * count + character, character * (count // len(character.encode()))):
            for text in (word, "Hi.\n" + word, word + "<|im_end|>x", word + " x"):
                for _ in range(2):
                    ids = words.encode(text)
                    assert ids is None or list(ids) == library_ids(backend, text)
                size = len(word.encode())  # what comes behind a word is looked at, too
                if backend.normalizer is None and (size <= 1020 or size > 1024 or text == word):
                    assert (ids is None) == (size > 1024)


@given(
    before=st.integers(380, 512),
    middle=st.lists(TRICKY | st.text(KNOWN, max_size=4), min_size=8, max_size=60).map("".join),
    cut=st.integers(512, 700),
    behind=TEXTS,
)
@example(before=500, middle="      " + "x" * 40, cut=512, behind=" y")
@example(before=505, middle="<|bos|" + "x" * 40, cut=512, behind=">\n<|bos|>")
@example(before=510, middle="<think>" + "x" * 40, cut=512, behind="able <think>")
@example(before=504, middle="<think><think>" + "x" * 40, cut=512, behind="x")
@example(before=498, middle='("<|endoftext|>' + "x" * 40, cut=512, behind="x")
@example(before=511, middle="\u4e2d\u6587" * 20, cut=514, behind="\u4e2d")
@settings(max_examples=100, deadline=None)
def test_beginnings_that_are_remembered_decide_what_any_text_would(
    both: tuple[tokenizers.Tokenizer, NativeWords], before: int, middle: str, cut: int, behind: str
) -> None:
    """A word may go on behind the piece that is known, and a token begin in it: both must be seen."""
    backend, words = both
    data = (FILLER.replace("\u00e9", "e")[:before] + middle).encode(errors="replace")
    text = data.decode()
    other = data[:cut].decode(errors="ignore") + behind.encode(errors="replace").decode()
    for each in (text, text, text, other, other, other):  # noted, remembered, known
        ids = words.encode(each)
        assert ids is None or list(ids) == library_ids(backend, each)
    assert 0 <= words.remembered(other) <= len(other.encode())


FILLER = "".join(f"The {at}th word's been \u00e9crit.\n  " for at in range(200))


def test_a_beginning_is_remembered_when_it_comes_again() -> None:
    backend = with_tokens(backend_of(QWEN))
    words = known_words(backend)
    system = "<think>" + FILLER[:3000]
    known = []
    for turn in range(5):
        text = f"{system}{turn} </think> and something else {turn}" * 2
        assert list(words.encode(text, "a") or ()) == library_ids(backend, text)
        known.append(words.remembered(text, "a"))
    assert known[0] == 0
    assert 2500 < known[-1] < 3100
    assert words.remembered(system, "b") == 0
    words.encode(system[:-1] + "!", "b")
    assert words.remembered(system, "b") == 0


def test_beginnings_that_nobody_comes_back_to_make_room() -> None:
    backend = backend_of(QWEN)
    words = known_words(backend)

    def text_of(number: int) -> str:
        return f"{number} {FILLER[:2300]}"

    for number in range(600):  # of four pieces each, beside the one that comes all the time
        assert number < 5 or words.remembered(text_of(-1)) > 2000
        for each in (text_of(number), text_of(number), text_of(-1)):
            ids = words.encode(each)
            if number % 100 == 0:
                assert list(ids or ()) == library_ids(backend, each)
    known = [words.remembered(text_of(number)) > 2000 for number in range(-1, 600)]
    assert known[0]
    assert 100 < sum(known) < 300
    assert not any(known[1:100])


def seeded_table(seed: int, factor: int) -> native_words._Table:
    library = native_words._library()
    table = native_words._Table.__new__(native_words._Table)
    table._library = library
    table.address = library.baton_words_new(seed, factor, 1000, 10**5)
    table.pointer = ctypes.c_void_p(table.address)
    return table


def learnt(words: NativeWords, text: str, expected: list[int], times: int) -> list[int]:
    known = []
    for _ in range(times):
        assert list(words.encode(text) or ()) == expected
        known.append(words.remembered(text))
    return known


def test_a_beginning_with_more_ids_than_a_call_returns_is_known_as_far_as_there_is_room() -> None:
    backend = backend_of(QWEN)
    words = known_words(backend)
    text = "".join(f"Line {at} of many.\n" for at in range(2500))
    expected = library_ids(backend, text)
    assert len(expected) > 2 * native_words._MAX_IDS
    for seed in range(1, 51):  # whatever the seed, pieces that share a note do not keep each other from being known
        words._known[""] = seeded_table(seed, 3)
        known = learnt(words, text, expected, 8)
        assert known[-1] == known[-2]
        assert native_words._MAX_IDS - 600 < len(library_ids(backend, text[: known[-1]])) <= native_words._MAX_IDS


def test_a_beginning_does_not_put_itself_out() -> None:
    """With some of these seeds a set has room for four pieces where this text has five."""
    backend = backend_of(QWEN)
    words = known_words(backend)
    text = " others" * 16000
    expected = library_ids(backend, text)
    whole = 0
    for seed in range(1, 31):
        words._known[""] = seeded_table(seed, 3)
        known = learnt(words, text, expected, 20)
        assert known == sorted(known)
        assert known[-1] == known[-4] > len(text) // 2
        whole += known[-1] > len(text) - 1024
    assert 10 < whole < 30


def test_beginnings_that_collide_are_told_apart() -> None:
    backend = backend_of(QWEN)
    words = known_words(backend)
    same = "abcdefgh"  # takes one half of a piece's hash to nought, whatever comes before
    words._known[""] = seeded_table(5, int.from_bytes(same.encode(), "little"))
    ends = ("aaaaaaa ", "aaaa aaa", "a aaaaaa")
    for end in (*ends, *ends, *ends, *ends):
        text = FILLER.replace("\u00e9", "e")[:480] + end + same + "q" * 20 + " and more of it" * 50
        assert list(words.encode(text) or ()) == library_ids(backend, text)
    assert words.remembered(text) > 600


@pytest.mark.parametrize("name", ["gpt2", "o200k"])
def test_every_character_is_what_it_is_to_the_library(name: str) -> None:
    table = split_table(RULES[name], composes=False)
    assert table is not None
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(RULES[name]), "isolated").pre_tokenize_str
    characters = [chr(code) for code in range(CHARACTERS) if not 0xD800 <= code < 0xE000]
    for at in range(0, len(characters), 2048):
        text = "".join(char + "\n" for char in characters[at : at + 2048])  # most kinds of words go no further
        assert table.words(text) == [word for word, _ in split(text)]


def test_python_and_c_split_alike() -> None:
    backend = backend_of(QWEN)
    words = known_words(backend)
    table: SplitTable = words._kept_alive[0]
    text = Path(__file__).read_text().replace("<|bos|>", "") + "\u4e2d\u6587 na\u00efve \U0001f600\n" * 3
    words.encode(text)
    found = table.words(text) or []
    assert len(found) > 1000
    assert len(words._known[""]) == len({word for word in found if len(word.encode()) <= 64})


@pytest.mark.parametrize(
    "pattern",
    [
        r"\p{L}++|[^\p{L}]",
        r"\p{L}+?|[^\p{L}]",
        r"(a)|[^a]+",
        r"^a|.",
        r"[[a-z]&&[^a]]+|.",
        r"(?m:a)|[^a]",
        r"(?<=a)b|.",
        r"\s+(?!\S)a|[^a]",
        r"\p{L}{1,3}+|.",
        r"(?i:ss)|[^s]",
        r"(?:a*)*|b",
        r"a*",
        r"(?=a)a|[^a]",
        r"\bword|[^w]",
        r"a|",
        r"(?:a|b",
        r"a)",
        r"a{2000}|[^a]",
    ],
)
def test_other_rules_are_not_read(pattern: str) -> None:
    assert read_rule(pattern) is None


@pytest.mark.parametrize(
    "pattern", [r"(?:aa|ab|[ab]){2}x?|[^x]{1,2}|x(?!\w)|x", r"a{0,2}b|ab{2,}|a|[\s\S]", r"(?:ab?|b){3}|[^c]"]
)
@given(text=st.text("abx c", max_size=30))
@settings(max_examples=100, deadline=None)
def test_rules_prefer_what_the_library_prefers(pattern: str, text: str) -> None:
    table = split_table(pattern, composes=False)
    assert table is not None
    words = table.words(text)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated").pre_tokenize_str
    assert words is None or words == [word for word, _ in split(text)]
    assert words is not None or "c" in text or "x" in text


def test_rules_with_gaps_or_too_many_rows_are_left_to_the_library() -> None:
    assert split_table(r"[ab]*a[ab]{13}|[\s\S]", composes=False) is None
    assert words_of(backend_of(r"\p{L}+|\s+")) is None


@pytest.mark.parametrize("options", [{"normalized": True}, {"single_word": True}, {"lstrip": True}, {"rstrip": True}])
def test_tokens_that_take_more_than_their_names(options: dict[str, bool]) -> None:
    backend = with_tokens(backend_of(QWEN), **options)
    backend.add_special_tokens(["<other>"])  # which is not "normalized"
    words = known_words(backend)
    assert words.encode("a <think> b") is None
    assert list(words.encode("a think b") or ()) == library_ids(backend, "a think b")
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("a <think> b", False) == library_ids(backend, "a <think> b")


def test_tokens_of_one_kind_are_found_normalized_or_not() -> None:
    backend = backend_of(None)
    backend.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in ("ab", "abcd", "bc", "\u00e9<")])
    words = known_words(backend)
    for text in ("abc", "abcd", "abcabcdbc", "xbcd \u00e9<<", "\u00e9 a b"):
        assert list(words.encode(text) or ()) == library_ids(backend, text)
    backend = backend_of(None)
    backend.add_tokens([tokenizers.AddedToken("\u00e9<", normalized=True)])
    assert words_of(backend) is None


def test_what_composition_may_change_is_left_to_the_library() -> None:
    backend = backend_of(QWEN)
    backend.normalizer = tokenizers.normalizers.NFC()
    words = known_words(backend)
    for text in ("e\u0301", "\u1100\u1161", "\uac00\u11a8", "\u212b", "a\u0378", "\U00020000"):
        assert words.encode(text) is None
    for text in ("\u00e9", "\uac00\uac01", "\u4e2d\u6587", "\U0001f600", "\u043f\u0440"):
        assert list(words.encode(text) or ()) == library_ids(backend, text)
    table: SplitTable = words._kept_alive[0]
    known = "".join(chr(code) for code in range(CHARACTERS) if table._class(code))
    assert unicodedata.is_normalized("NFC", known)
    backend.normalizer = tokenizers.normalizers.Lowercase()
    assert words_of(backend) is None


def test_words_of_one_salt_are_not_known_to_another() -> None:
    words = known_words(backend_of(None))
    words.encode("one two two", "a")
    words.encode("one two three", "a")
    words.encode("one two", "b")
    assert {salt: len(table) for salt, table in words._known.items()} == {"a": 3, "b": 2}


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_words, "_MAX_WORDS", 50)
    monkeypatch.setattr(native_words, "_MAX_SALTS", 3)
    backend = backend_of(None)
    words = known_words(backend)
    for at in range(60):
        text = f"a b c {chr(97 + at % 26)}{at} w{at}x{at}y{at} " + "x" * 65
        assert list(words.encode(text, f"salt {at % 5}") or ()) == library_ids(backend, text)
        assert all(0 < len(table) <= 50 for table in words._known.values())
    assert len(words._known) == 3
    for room in (0, 20):  # none, and a few
        monkeypatch.setattr(native_words, "_MAX_BYTES", 32 * room)
        words = known_words(backend)
        text = " ".join(f"{chr(97 + at % 26)}{at}" for at in range(100))
        for _ in range(2):
            assert list(words.encode(text) or ()) == library_ids(backend, text)
        assert len(words._known[""]) <= room


# --- what words are merged to ---


def spelt(word: bytes) -> str:
    return word.decode("latin-1").translate(native_words._BYTE_CHARS)


def merged(backend: tokenizers.Tokenizer) -> native_words._Merges:
    merges = native_words._merges(json.loads(backend.to_str())["model"], native_words._library())
    assert merges is not None
    return merges


@given(
    order=st.randoms(use_true_random=False),
    count=st.integers(0, 60),
    words=st.lists(st.lists(st.sampled_from(b"abc"), min_size=1, max_size=200).map(bytes), min_size=1, max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_words_are_merged_as_the_library_merges_them(order: random.Random, count: int, words: list[bytes]) -> None:
    """Models as no training makes them: ranks in any order, pairs that lead nowhere, one token by several ways."""
    vocabulary = {char: at for at, char in enumerate(native_words._BYTE_CHARS)}
    made, pairs = ["a", "b", "c"], []
    for _ in range(count):
        pair = order.choice(made), order.choice(made)
        if len("".join(pair)) > 12 or pair in pairs:
            continue
        pairs.append(pair)
        vocabulary.setdefault("".join(pair), len(vocabulary))
        made.append("".join(pair))
    order.shuffle(pairs)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=pairs))
    merges = merged(backend)
    for word in words:
        assert merges.word(word) == [token.id for token in backend.model.tokenize(spelt(word))]


@given(word=st.binary(min_size=1, max_size=1024))
@example(b"\x00" * 1024)
@example(b" " * 1023)
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_merged(word: bytes) -> None:
    backend = MODEL.tokenizer._backend
    assert DEMO_MERGES.word(word) == [token.id for token in backend.model.tokenize(spelt(word))]


DEMO_MERGES = merged(MODEL.tokenizer._backend)


def with_model(backend: tokenizers.Tokenizer, whole: tuple[str, ...] = (), **changed: object) -> tokenizers.Tokenizer:
    parts = json.loads(backend.to_str())
    for word in whole:
        parts["model"]["vocab"].setdefault(word, max(parts["model"]["vocab"].values()) + 1)
    parts["model"] |= changed
    return tokenizers.Tokenizer.from_str(json.dumps(parts))


def test_words_that_are_whole_though_merging_does_not_lead_there() -> None:
    whole = (
        "\u0120xyzzy",
        "\u0120the\u0120cat",
        "plugh",
        "\u0120plu ghs",
        "q" * 64,
        "z" * 100,
        "\u00a9 \u00a9",
        "\u4e2d",
        "\u00e4",
    )
    text = "xyzzy xyzzy plugh plughs the cat \n" + "q" * 64 + " \u4e2d\u00e4 \u00a9 \u00a9"
    for ignore in (True, False):
        backend = with_model(backend_of(QWEN), whole, ignore_merges=ignore)
        words = known_words(backend)
        for salt in ("a", "a", "b"):
            assert list(words.encode(text, salt) or ()) == library_ids(backend, text)
        for size in (63, 64, 65, 99, 100, 101):
            for letter in "qz":
                ids = words.encode(letter * size)
                assert ids is None or list(ids) == library_ids(backend, letter * size)
                assert (ids is None) == (ignore and 64 < size <= 100)
        token = (ignore and backend.token_to_id("\u0120xyzzy")) or -1
        assert (token in (words.encode(text) or ())) == ignore


def test_models_whose_words_are_not_merged_of_their_bytes_alone() -> None:
    backend = backend_of(QWEN)
    for changed in ({"dropout": 0.1}, {"continuing_subword_prefix": "##"}, {"end_of_word_suffix": "</w>"}):
        assert native_words._merges(json.loads(backend.to_str())["model"] | changed, native_words._library()) is None
    model = json.loads(backend.to_str())["model"]
    model["merges"] = [" ".join(pair) for pair in model["merges"]]  # as older versions write them
    older = native_words._merges(model, native_words._library())
    assert older is not None
    assert older.word(b" the") == merged(backend).word(b" the")
    for missing in ("\u0120the", "\u0120"):  # as the library writes a model with two words of one id
        del model["vocab"][missing]
        assert native_words._merges(model, native_words._library()) is None


def test_more_new_words_than_are_merged_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(native_words.time, "sleep", pauses.append)
    backend = backend_of(QWEN)
    words = known_words(backend)
    rng = random.Random(1)
    text = " ".join("".join(rng.choices(["others", "words", "text", "library"], k=10)) for _ in range(2000))
    expected = library_ids(backend, text)
    assert list(words.encode(text) or ()) == expected
    assert len(pauses) > len(expected) // native_words._MAX_IDS + 2
    assert len(pauses) >= len(text) // 10_000


def test_words_that_collide_cost_a_bounded_search() -> None:
    library = native_words._library()
    same = b"\x01345678"
    table = native_words._Table.__new__(native_words._Table)
    table._library, table.address = library, library.baton_words_new(5, int.from_bytes(same, "little"), 1000, 10**5)
    for at in range(100):  # whose second half takes the hash to nought
        table.add(b"%08d%s" % (at, same), array.array("I", [at]))
    assert len(table) == 64


def test_long_texts_are_done_piece_by_piece() -> None:
    backend = MODEL.tokenizer._backend
    words = known_words(backend)
    source = Path(__file__).read_text() + "<|im_end|>" + Path(json.__file__).read_text()
    text = source * (1 + 100_000 // len(source))
    expected = library_ids(backend, text)
    assert len(expected) > native_words._MAX_IDS
    for _ in range(2):
        assert list(words.encode(text) or ()) == expected
    assert words.encode("x" * 2**20) is None
    assert words.encode("\n" + " " * 2000 + "a") is None


def test_several_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_words, "_MAX_WORDS", 300)  # so that it begins anew all the time
    backend = MODEL.tokenizer._backend
    words = known_words(backend)
    source = Path(__file__).read_text()
    texts = [source[at : at + 3000] for at in range(0, 9000, 1000)]
    expected = [library_ids(backend, text) for text in texts]
    wrong: list[int] = []

    def work(first: int) -> None:
        for at in range(first, first + 40):
            ids = words.encode(texts[at % len(texts)], f"{at % 2}")
            if ids is None or list(ids) != expected[at % len(texts)]:
                wrong.append(at)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_a_tokenizer_uses_them_and_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "<|im_start|>user\nWords of na\u00efve text, \u4e2d\u6587 " * 40
    tokenizer = Tokenizer(MODEL.tokenizer._backend)
    assert tokenizer._words is not None
    expected = MODEL.tokenizer._backend.encode(text).ids
    assert tokenizer.encode(text) == expected
    assert len(tokenizer._words._known[""]) > 5
    assert tokenizer._pieces is not None
    assert not tokenizer._pieces._known
    assert native_words._library.__wrapped__(("no-such-compiler",)) is None
    monkeypatch.setattr(native_words, "_library", lambda: None)
    tokenizer = Tokenizer(MODEL.tokenizer._backend)
    assert tokenizer._words is None
    assert tokenizer._pieces is not None
    assert isinstance(tokenizer._pieces._words, WordCache)
    assert tokenizer.encode(text) == expected
