"""Anchors that are tokens of the tokenizer: only those tokens are anchors, whatever else the text spells."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.dialects.samples import IRREGULAR_SAMPLES, SAMPLES, SCHEMAS, TEMPLATE_SAMPLES, Sample
from tests.unit.dialects.test_dialects import _merged

from baton.dialects import DialectParser, Event
from baton.dialects.builtin import choose_dialects
from baton.dialects.token_anchors import MARK, TokenAnchors

_NAMES = re.compile(
    r"<(?!function=|invoke|parameter|/)[^<>\s]*>|</(?!function|invoke|parameter)[^<>\s]*>|\[/?[A-Z_]+\]"
)
"""What the families' tokenizers have as one token."""
_ALL = tuple(
    (sample, dialects, TokenAnchors(dialects.tools, dialects.reasoning, dict(enumerate(names))))
    for sample, dialects in (
        *(
            (sample, choose_dialects(sample.dialect, sample.reasoning_dialect))
            for sample in (*SAMPLES, *IRREGULAR_SAMPLES)
        ),
        *((sample, choose_dialects(response_template=template)) for template, sample in TEMPLATE_SAMPLES),
    )
    if (found := {*_NAMES.findall(sample.text + sample.prompt)})
    for names in [sorted({*found, *(name.replace("</", "<") for name in found)})]
)
_TOKENS = tuple(
    case
    for case in _ALL
    if not (case[0].text.startswith("<function=") or "<tool_call>" in case[0].reasoning)  # a token is no mere word
)
_SPELLED = tuple(
    case
    for case in _ALL
    if case[0].text.startswith(("<", "[TOOL")) and case[2].ids and "template" not in case[0].dialect
)


def _parse(anchors: TokenAnchors, prompt: str, pieces: Iterable[tuple[str, Sequence[int]]]) -> Any:
    tools, reasoning = anchors.tools, anchors.reasoning
    parser = DialectParser(tools, reasoning, schemas=SCHEMAS, prompt=anchors.mark_prompt(prompt))
    events: list[Event] = []
    for text, places in pieces:
        events += parser.feed(text, places)
    return _merged(events + parser.finish())


def _places(text: str) -> list[int]:
    """Return where a text would have tokens if all that it spells were such."""
    return [match.start() for match in _NAMES.finditer(text)]


def _cut(text: str, places: Sequence[int], cuts: Sequence[int]) -> list[tuple[str, list[int]]]:
    ends = itertools.pairwise([0, *cuts, len(text)])
    return [(text[a:b], [at - a for at in places if a <= at < b]) for a, b in ends]


@pytest.mark.parametrize(("sample", "dialects", "anchors"), _TOKENS)
def test_anchors_of_tokens_say_what_the_characters_did(sample: Sample, dialects: Any, anchors: TokenAnchors) -> None:
    places = _places(sample.text)
    whole = _parse(anchors, sample.prompt, [(sample.text, places)])
    assert whole[:2] == (sample.content, sample.reasoning)
    assert [(name, json.loads(arguments)) for name, arguments in whole[2]] == list(sample.calls)
    for at in range(1, len(sample.text)):
        assert _parse(anchors, sample.prompt, _cut(sample.text, places, [at])) == whole, at


@pytest.mark.parametrize(("sample", "dialects", "anchors"), _SPELLED)
def test_what_other_tokens_spell_is_text(sample: Sample, dialects: Any, anchors: TokenAnchors) -> None:
    assert _parse(anchors, "", [(sample.text, ())]) == (sample.text, "", [])
    assert _parse(anchors, "", [(char, ()) for char in sample.text]) == (sample.text, "", [])


@given(st.sampled_from(_ALL), st.data())
@settings(max_examples=400, deadline=None)
def test_whichever_of_them_are_tokens_the_pieces_never_matter(case: Any, data: st.DataObject) -> None:
    sample, _, anchors = case
    found = _places(sample.text)
    places = sorted(data.draw(st.sets(st.sampled_from(found)))) if found else []
    cuts = sorted(data.draw(st.sets(st.integers(0, len(sample.text)), max_size=8)))
    whole = _parse(anchors, sample.prompt, [(sample.text, places)])
    assert _parse(anchors, sample.prompt, _cut(sample.text, places, cuts)) == whole
    assert MARK not in str(whole)


def test_a_tokenizer_without_the_token_leaves_the_characters() -> None:
    dialects = choose_dialects("hermes", "think")
    anchors = TokenAnchors(dialects.tools, dialects.reasoning, {7: "<tool_call>", 8: "</tool_call>", 9: "<|im_end|>"})
    assert anchors.ids == {7, 8}
    call = '<tool_call>{"name": "get_time"}</tool_call>'
    text = f"<think>\nWith {call}?\n</think>{call} and {call}"
    real = text.rindex(call)
    places = [real, text.rindex("</tool_call>")]
    assert _parse(anchors, "", [(text, places)]) == (f"{call} and", f"With {call}?", [("get_time", "{}")])


def test_a_quoted_call_within_a_call_is_an_argument() -> None:
    dialects = choose_dialects("qwen3_coder", "none")
    anchors = TokenAnchors(dialects.tools, None, {7: "<tool_call>", 8: "</tool_call>"})
    quoted = "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"
    text = f"<tool_call>\n<function=write_file>\n<parameter=path>\n{quoted}\n</parameter>\n</function>\n</tool_call>"
    places = [0, text.rindex("</tool_call>")]
    _, _, ((name, arguments),) = _parse(anchors, "", [(text, places)])
    assert (name, json.loads(arguments)) == ("write_file", {"path": quoted})


def test_the_mark_of_an_anchor_cannot_be_written_by_a_model() -> None:
    dialects = choose_dialects("hermes", "none")
    anchors = TokenAnchors(dialects.tools, None, {7: "<tool_call>", 8: "</tool_call>"})
    text = f'{MARK}<tool_call>{{"name": "get_time"}}{MARK}</tool_call>'
    assert _parse(anchors, "", [(text, ())]) == (text.replace(MARK, "\ufffd"), "", [])


def test_a_token_within_a_string_ends_a_call_that_was_not_closed() -> None:
    dialects = choose_dialects("hermes", "none")
    anchors = TokenAnchors(dialects.tools, None, {7: "<tool_call>", 8: "</tool_call>"})
    text = '<tool_call>{"name": "get_time", "arguments": {"a": "</tool_call> '
    call = '<tool_call>{"name": "get_time"}</tool_call>'
    end = len(text)
    places = [0, end, end + len("</tool_call>"), end + len("</tool_call>") + call.rindex("<")]
    pieces = _cut(f"{text}</tool_call>{call}", places, [*range(1, end)])
    assert _parse(anchors, "", pieces) == ("", "", [("get_time", '{"a": "</tool_call> '), ("get_time", "{}")])
