"""Added tokens that are not special, as Qwen's ``<tool_call>``: grammars know them as tokens, and not by their text."""

from __future__ import annotations

from pathlib import Path

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from baton.engine.grammar.constraint import GrammarCompiler, load_compiler
from baton.grammar import lark_grammar
from baton.tokenizer import Tokenizer
from baton.types import Grammar

PLAIN = ["<tool_call>", "</think>", "[TOOL]", "<x", "y>", "<|a|>", "<tool call>"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("added")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Core(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_tokens([AddedToken(name, special=False, normalized=False) for name in PLAIN])
    core.add_special_tokens([AddedToken(name, special=True) for name in ("[INST]", "</s>")])
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(model)


@pytest.fixture(scope="module")
def compiler(model: Path, tokenizer: Tokenizer) -> GrammarCompiler:
    eos = tokenizer.eos_token_ids
    found = load_compiler("llguidance", model, vocab_size=tokenizer.vocab_size, eos_token_ids=eos)
    assert found is not None
    return found


def test_markers_are_what_the_backend_takes_for_special(model: Path, tokenizer: Tokenizer) -> None:
    theirs = LLTokenizer(str(model / "tokenizer.json"))
    # Of the tokens behind the 256 bytes.
    found = {token for token in range(256, tokenizer.vocab_size) if theirs.is_special_token(token)}
    assert tokenizer.marker_ids == found
    assert {tokenizer.token_id(name) for name in ("<tool_call>", "</think>")} <= found
    assert tokenizer.token_id("[TOOL]") not in found


def test_a_marker_is_followed_as_a_token_and_a_literal_is_spelled(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    call = tokenizer.token_id("<tool_call>")
    assert call is not None
    marked = compiler.constraint(Grammar("tools", f'start: <[{call}]> "ab"'))
    assert marked.allows(call)
    literal = compiler.constraint(lark_grammar('start: "<tool_call>ab"'))
    for letter in "<tool_call>ab":
        assert not literal.allows(call)
        for token in literal.forced():  # never one that does not follow
            assert literal.allows(token)
        literal.append(tokenizer.encode(letter)[0])
        assert not literal.error
    assert literal.complete
