"""Added tokens that are not special, as Qwen's ``<tool_call>``: grammars know them as tokens, and not by their text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from baton.engine.grammar.constraint import GrammarCompiler, load_compiler
from baton.grammar import choice_grammar, json_schema_grammar, lark_grammar, regex_grammar
from baton.tokenizer import Tokenizer
from baton.types import Grammar
from baton_kernels.token_mask import mask_words, unpack_mask

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


SHIPPED = sorted(path.parent for path in (Path(__file__).parents[4] / "models").glob("*/tokenizer.json"))


def added_tokens(model: Path) -> list[str]:
    return [token["content"] for token in json.loads((model / "tokenizer.json").read_text())["added_tokens"]]


def masked_walk(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, data: st.DataObject) -> str:
    """Return the text of one answer that the masks allow, having compared them with what the matcher takes."""
    constraint = compiler.constraint(grammar)
    masks = np.zeros((2, mask_words(tokenizer.vocab_size)), np.uint32)
    output = list[int]()
    while not constraint.complete:
        compiler.backend.fill_masks([constraint.matcher], masks[:1])
        compiler.backend.fill_mask(constraint.matcher, masks[1])
        assert (masks[0] == masks[1]).all()
        allowed = np.flatnonzero(unpack_mask(masks[0], tokenizer.vocab_size)).tolist()
        assert allowed, tokenizer.decode(output)
        assert [token for token in allowed if not constraint.matcher.allows(token)] == []
        if forced := constraint.forced():
            assert forced == allowed, "forced tokens are those that masks would choose"
        token = data.draw(st.sampled_from(allowed))
        if token in tokenizer.eos_token_ids:
            break
        constraint.append(token)
        output.append(token)
        assert not constraint.error
    return tokenizer.decode(output)


def grammar_of(kind: str, texts: list[str]) -> Grammar:
    match kind:
        case "choice":
            return choice_grammar(texts)
        case "regex":
            return regex_grammar("|".join(map(re.escape, texts)))
        case _:
            return json_schema_grammar({"const": texts[0]} if len(texts) == 1 else {"enum": texts})


@pytest.mark.parametrize("kind", ["choice", "regex", "json"])
@pytest.mark.parametrize("folder", [*SHIPPED, None], ids=lambda path: path.name if path else "other marks")
def test_a_literal_that_spells_an_added_token_is_one_of_the_answers(
    folder: Path | None, kind: str, model: Path
) -> None:
    folder = folder or model
    tokenizer = Tokenizer.load(folder)
    eos = tokenizer.eos_token_ids
    compiler = load_compiler("llguidance", folder, vocab_size=tokenizer.vocab_size, eos_token_ids=eos)
    assert compiler is not None
    around = st.text(st.sampled_from("ab <|>é\n"), max_size=3)

    @settings(max_examples=4, deadline=None, derandomize=True, database=None)
    @given(data=st.data())
    def check(name: str, data: st.DataObject) -> None:
        text = data.draw(around) + name + data.draw(around)
        others = data.draw(st.lists(st.sampled_from([text + "x", text[:-1] or "y", name + name, "ab"]), max_size=2))
        texts = list(dict.fromkeys([text, *others]))
        answer = masked_walk(compiler, tokenizer, grammar_of(kind, texts), data)
        assert (json.loads(answer) if kind == "json" else answer) in texts

    for name in added_tokens(folder):
        check(name)
