"""Stop strings against a naive search."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.tokenizer import StopStringMatcher, StopStrings


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first stop string to be complete, the longest of several; text before it."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text("ab\n", max_size=40),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=6), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 40), max_size=40),
    include=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_equals_naive_search(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    matcher = StopStringMatcher(stops, include=include)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    emitted = ""
    for begin, end in itertools.pairwise(bounds):
        emitted += matcher.push(text[begin:end])
        if matcher.matched is None:
            held = text[len(emitted) : end]
            assert emitted + held == text[:end]
            assert held == "" or any(stop.startswith(held) for stop in stops)  # nothing is held without need
    before, stop = naive(text, stops)
    if stop is None:
        emitted += matcher.flush()
    assert matcher.matched == stop
    assert emitted == before + (stop or "" if include else "")


def test_nothing_after_a_match() -> None:
    matcher = StopStringMatcher(["END"])
    assert matcher.push("textEND more") == "text"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_compiled_once_for_many_sequences() -> None:
    stops = StopStrings(["###", "\n\n"])
    first, second = StopStringMatcher(stops), StopStringMatcher(stops)
    assert first.push("a#") == "a"
    assert second.push("b\n") == "b"
    assert first.push("##") == ""
    assert (first.matched, second.matched) == ("###", None)
    assert second.flush() == "\n"


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStringMatcher(["a", ""])
