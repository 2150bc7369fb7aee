"""How long outputs are expected to get, and whether that fits."""

from __future__ import annotations

import pytest

from baton.engine.scheduler import MIN_OUTPUTS, OUTPUTS_KEPT, UNKNOWN_LENGTH, OutputLengths


def test_nothing_known_counts_the_limit_or_a_guess_that_doubles() -> None:
    lengths = OutputLengths()
    assert lengths.expected(0, 10) == 10
    assert lengths.expected(0, 4000) == UNKNOWN_LENGTH
    assert lengths.expected(UNKNOWN_LENGTH, 4000) == 2 * UNKNOWN_LENGTH
    assert lengths.expected(3999, 4000) == 4000


def test_lengths_that_were_observed_count_given_what_is_there() -> None:
    lengths = OutputLengths()
    for length in [*range(10, 10 * MIN_OUTPUTS, 10), 1000]:
        lengths.add(length)
    assert lengths.expected(0, 4000) == 40
    assert lengths.expected(0, 30) == 30
    assert lengths.expected(65, 4000) == 70
    assert lengths.expected(75, 4000) == 1000
    assert lengths.expected(1000, 4000) == 2000  # longer than all of them


def test_old_lengths_are_forgotten() -> None:
    lengths = OutputLengths()
    for _ in range(OUTPUTS_KEPT):
        lengths.add(1000)
    for _ in range(OUTPUTS_KEPT):
        lengths.add(5)
    assert lengths.expected(0, 4000) == 5


@pytest.mark.parametrize("done", [0, 1, 7, 500])
def test_more_is_always_expected(done: int) -> None:
    lengths = OutputLengths()
    for _ in range(MIN_OUTPUTS):
        lengths.add(1)
    assert lengths.expected(done, 4000) > done
