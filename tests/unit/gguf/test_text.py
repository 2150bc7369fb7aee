"""Tokenizers out of GGUF files: the ids are those of the model's own tokenizer, or of the algorithm by its book."""

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models.gguf_files import CONTROL, NORMAL, finish, write_tokenizer

from baton.errors import ConfigError
from baton.gguf.files import GgufModel
from baton.tokenizer import TextModel, Tokenizer

TINY = Path(__file__).resolve().parents[3] / "models" / "baton-tiny"
USER_DEFINED, BYTE, UNKNOWN = 4, 6, 2


def write(path: Path, fill: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    finish(writer)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return TextModel.load(write(path, lambda writer: write_tokenizer(writer, TINY, "llama-bpe")))


@pytest.fixture(scope="module")
def own() -> TextModel:
    return TextModel.load(TINY)


def test_byte_level_gives_the_ids_of_the_models_own_tokenizer(tiny: TextModel, own: TextModel) -> None:
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    for text in [*texts, "x = 12345\r\n\r\n  é日本 <|im_end|>\t", ""]:
        ids = tiny.tokenizer.encode(text)
        assert ids == own.tokenizer.encode(text)
        assert tiny.tokenizer.decode(ids) == own.tokenizer.decode(ids)


def test_special_tokens_ends_and_chat_template_come_along(tiny: TextModel, own: TextModel) -> None:
    assert tiny.tokenizer.special_tokens == {
        name: token for name, token in own.tokenizer.special_tokens.items() if name in tiny.tokenizer.special_tokens
    }
    assert tiny.tokenizer.eos_token_ids == own.tokenizer.eos_token_ids == {2, 4}
    assert tiny.tokenizer.special_ids == own.tokenizer.special_ids
    messages = [{"role": "user", "content": "Write <|im_end|> a function"}]
    prompt = tiny.chat_text(messages)
    assert prompt.text == own.chat_text(messages).text
    assert list(tiny.encode(prompt, add_special_tokens=False)) == list(
        own.encode(own.chat_text(messages), add_special_tokens=False)
    )


# SentencePiece

WORDS = {"▁": -2.0, "a": -3.0, "b": -4.0, "c": -5.0, "ab": -1.0, "▁a": -1.5, "abc": -6.0, "▁ab": -7.0, "bc": -0.5}
SPECIAL = ["<unk>", "<s>", "</s>"]


def sentencepiece(writer: gguf.GGUFWriter, **changes: Any) -> None:
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, "<tool>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(WORDS), USER_DEFINED]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(changes.get("tokens", tokens))
    writer.add_token_types(changes.get("types", types))
    writer.add_token_scores(changes.get("scores", [0.0] * 259 + list(WORDS.values()) + [-1000.0]))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if "prefix" in changes:
        writer.add_add_space_prefix(changes["prefix"])


def merged(text: str) -> list[str]:
    """SentencePiece's BPE: of all neighbours that make a token, those of the best score, the first of them first."""
    pieces = list(text)
    while True:
        neighbours = map("".join, itertools.pairwise(pieces))
        pairs = [(WORDS[pair], -at) for at, pair in enumerate(neighbours) if pair in WORDS]
        if not pairs:
            return pieces
        at = -max(pairs)[1]
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]


@pytest.fixture(scope="module", params=[True, False])
def spm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, bool]:
    path = tmp_path_factory.mktemp("spm") / "m.gguf"
    return Tokenizer.load(write(path, lambda writer: sentencepiece(writer, prefix=request.param))), request.param


@settings(deadline=None, max_examples=100)
@given(text=st.text("abc \né", max_size=40))
def test_sentencepiece_merges_by_score(spm: tuple[Tokenizer, bool], text: str) -> None:
    tokenizer, prefix = spm
    expected = [1]
    for piece in merged(("▁" if prefix and text else "") + text.replace(" ", "▁")):
        known = tokenizer.token_id(piece)
        expected += [known] if known is not None else [tokenizer.token_id(f"<0x{b:02X}>") for b in piece.encode()]
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


def test_sentencepiece_tokens_of_users_and_control(spm: tuple[Tokenizer, bool]) -> None:
    tokenizer, _ = spm
    ids = tokenizer.encode("a<tool>b</s>", add_special_tokens=False)
    assert {tokenizer.token_id("<tool>"), 2} <= set(ids)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.scheme is not None


def test_scores_of_llama_2_are_ranks(tmp_path: Path) -> None:
    """Ids of a longer word are those of merging by rank, though several pairs make the same token."""
    tokens = [*SPECIAL, "▁", "a", "b", "ab", "ba", "aba", "abab"]
    types, scores = (
        [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * 7],
        [0.0, 0.0, 0.0, -9.0, -8.0, -7.0, -1.0, -2.0, -3.0, -4.0],
    )
    path = write(
        tmp_path / "m.gguf",
        lambda writer: sentencepiece(writer, tokens=tokens, types=types, scores=scores, prefix=False),
    )
    assert Tokenizer.load(path).encode("ababa") == [1, tokens.index("ab"), tokens.index("aba")]


# Refusals


def damaged(key: str, value: Any) -> Any:
    def fill(writer: gguf.GGUFWriter) -> None:
        write_tokenizer(writer, TINY, "llama-bpe")
        writer.kv_data[0].pop(key)
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)

    return fill


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("tokenizer.ggml.model", "bert", "model: the tokenizer 'bert' is not supported"),
        ("tokenizer.ggml.model", "t5", "model: the tokenizer 't5' is not supported"),
        ("tokenizer.ggml.pre", "kimi-k2", "pre: 'kimi-k2' is no way of splitting words that Baton knows"),
        ("tokenizer.ggml.tokens", None, "tokens: there is no such list of strings"),
        ("tokenizer.ggml.tokens", ["a", "b", "a"], "tokens: the same token twice"),
        ("tokenizer.ggml.merges", None, "merges: there is no such list of strings"),
        ("tokenizer.ggml.merges", ["!"], r"merges: merge 0 \('!'\) is not of two tokens"),
        ("tokenizer.ggml.merges", ["! nothing"], "merges: merge 0"),
        ("tokenizer.ggml.token_type", [1, 2], "token_type: is not one number for each of 4096 tokens"),
        ("tokenizer.ggml.add_bos_token", "yes", "add_bos_token: is 'yes', not a bool"),
    ],
)
def test_tokenizers_that_cannot_be_used(tmp_path: Path, key: str, value: Any, why: str) -> None:
    path = write(tmp_path / "m.gguf", damaged(key, value))
    with pytest.raises(ConfigError, match=why) as refused:
        Tokenizer.load(path)
    assert refused.value.message.startswith(f"{path}: tokenizer.ggml.")


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", lambda writer: None)
    assert GgufModel(path).read("tokenizer.json") is None
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        Tokenizer.load(path)


def test_scores_that_are_no_numbers(tmp_path: Path) -> None:
    scores = [float("nan")] * (len(SPECIAL) + 256 + len(WORDS) + 1)
    path = write(tmp_path / "m.gguf", lambda writer: sentencepiece(writer, scores=scores))
    with pytest.raises(ConfigError, match="scores: a score is no number"):
        Tokenizer.load(path)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", "smollm"])
def test_ways_of_splitting_words_keep_the_text(tmp_path: Path, pre: str) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", lambda writer: write_tokenizer(writer, TINY, pre)))
    text = "It's 12345 tokens,\r\n\r\n  and WE'RE done:\n\tnaïveCafé日本語 <=>  "
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    digits = tokenizer.encode("12345", add_special_tokens=False)
    if pre in {"qwen2", "tekken", "smollm"}:
        assert [tokenizer.token_text(item) for item in digits] == list("12345")
    assert json.loads(GgufModel(tmp_path / "m.gguf").read("tokenizer_config.json") or b"")["bos_token"] == "<|bos|>"
