"""Answers that were made to cost: clients have models write what they like, and the router reads it in its loop."""

from __future__ import annotations

import pytest

from baton.dialects import TOOL_DIALECTS, DialectParser, Text
from baton.dialects.parser import MAX_REREAD
from baton.dialects.source import beginning_at_end

UNITS = [
    ("hermes", "<tool_call>x"),
    ("hermes", '<tool_call>{"arguments": {"'),
    ("pythonic", "<|python_start|>[f("),
    ("qwen3_coder", "<tool_call><function="),
]
LONG = 400_000
"""Characters; each of these took minutes, in which the router did nothing else."""


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("dialect", "unit"), UNITS)
def test_beginnings_of_calls_over_and_over_stay_text_and_are_read_a_few_times(
    dialect: str, unit: str, whole: bool
) -> None:
    text = unit * (LONG // len(unit))
    step = len(text) if whole else 1000
    parser = DialectParser(TOOL_DIALECTS[dialect])
    found = [event for at in range(0, len(text), step) for event in parser.feed(text[at : at + step])]
    found += parser.finish()
    assert parser.calls == 0
    assert "".join(event.text for event in found if isinstance(event, Text)) == text
    assert parser._source.num_reread <= MAX_REREAD + 256 * 1024


def test_a_call_with_thousands_of_arguments_is_written_once() -> None:
    parser = DialectParser(TOOL_DIALECTS["pythonic"], schemas={"f": {}})
    parser.feed("[f(" + ",".join(f"from{at}={at}" for at in range(16_000)) + ")]")
    parser.finish()
    assert parser.calls == 1


@pytest.mark.parametrize("text", ["", "a", "a<", "a<tool", "a<tool_call", "<<", "<tool_call><tool", "x" * 50 + "[TOOL"])
def test_what_a_text_ends_with_is_found_by_a_look_at_its_end(text: str) -> None:
    literals = ("<tool_call>", "[TOOL_CALLS]", "<")
    beginnings = [at for at in range(len(text)) if any(item.startswith(text[at:]) for item in literals)]
    open_ends = [
        at
        for at in beginnings
        if text[at:] not in literals or any(item != text[at:] and item.startswith(text[at:]) for item in literals)
    ]
    assert beginning_at_end(literals, text, 0) == min(open_ends, default=None)
