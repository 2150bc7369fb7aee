"""A text never has fewer tokens than said: refusing by the bound refuses nothing that would fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from baton.tokenizer import Tokenizer

TINY = Path(__file__).parents[3] / "models" / "baton-tiny" / "tokenizer.json"


def variant(**changes: Any) -> Tokenizer:
    """The demo model's tokenizer with parts exchanged; ``model_...`` goes into the model."""
    parts = json.loads(TINY.read_text())
    for name, value in changes.items():
        if name.startswith("model_"):
            parts["model"][name.removeprefix("model_")] = value
        else:
            parts[name] = value
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(parts)))


PLAIN = variant()
NFC = variant(normalizer={"type": "NFC"})


@given(st.text(max_size=300))
@example("")
@example(" " * 1000)
@example("<|im_end|>" * 50)
@example("\u1112\u1161\u11ab" * 100)
@example("e\u0301" * 100)
@example("\U0001f600" * 100)
def test_fewest_tokens_is_a_lower_bound(text: str) -> None:
    for tokenizer in (PLAIN, NFC):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_a_long_text_has_many_tokens() -> None:
    assert PLAIN.fewest_tokens("a" * 1_000_000) > 10_000
    assert 0 < NFC.fewest_tokens("a" * 1_000_000) < PLAIN.fewest_tokens("a" * 1_000_000)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, " " * 10_000),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Removed", "invert": False},
                        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
                    ],
                }
            },
            " " * 10_000,
        ),
        ({"model_vocab": {"a": 0}, "model_merges": [], "added_tokens": [], "post_processor": None}, "b" * 10_000),
        (
            {"added_tokens": [{**json.loads(TINY.read_text())["added_tokens"][0], "lstrip": True}]},
            " " * 10_000 + "<|pad|>",
        ),
    ],
    ids=["normalizer", "pre_tokenizer", "alphabet", "lstrip"],
)
def test_nothing_is_claimed_where_text_can_vanish(changes: dict[str, Any], text: str) -> None:
    tokenizer = variant(**changes)
    assert len(tokenizer.encode(text, add_special_tokens=False)) <= 1, "the example shows nothing"
    assert tokenizer.fewest_tokens(text) == 0
