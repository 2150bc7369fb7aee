"""How many draft tokens a step verifies: as many as give the most tokens per second, none included.

A step of ``B`` sequences gives ``B`` tokens without drafts, and with draft tokens of chances ``c`` as many more as
their sum; it takes the time of a step of so many rows, which is learnt from the steps that were run. Of trees that
holds as of chains: each token is a row, and of those that are alternatives one at most is right.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from baton.engine.speculation.tree import chances_of

GAIN = 1.02
"""Drafts must be expected to give so many times the tokens per second: what is learnt of times is not exact."""
MOST_PAUSE = 32
"""Steps at most between two looks at whether drafts pay, after those that did not; it doubles from 1 on ..."""
LOOK_SHARE = 0.01
"""... and is so long that drafting for the looks takes no more than this share of the time, ..."""
COSTLY_PAUSE = 512
"""... but no longer than this."""
TRIAL = 32
"""Every so many steps with drafts, one without or with twice as many is run, to see what it takes ..."""
RARE_TRIAL = 8
"""... and after so many looks that found none to pay, one with a draft token per sequence."""
FIRST_TRIALS = 4
"""So many such trials come first, whatever the looks find: nothing is known then of how often drafts are right."""

_FEW = 16
"""Numbers of rows up to this one are told apart; beyond, eighths of an octave."""
_COMMON = 0.15
"""Weight of a step in what all sizes have in common: longer contexts, a machine that is busy ..."""
_OWN = 0.1
"""... and in what is known of its own size."""
_OUTLIER = 1.0
"""A step that took e times what was expected, or more, counts as that."""
_PLATEAU = 8.0
"""Before it is known: a step of n rows takes as long as n plus so many would, were its time proportional."""


class StepTimes:
    """Seconds of steps by their number of rows, in logarithms: a part that all share, and one for each size."""

    def __init__(self) -> None:
        self._common = math.nan
        self._own: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._rows: npt.NDArray[np.float64] = np.empty(0)
        self._logs: npt.NDArray[np.float64] = np.empty(0)

    def knows(self, rows: int) -> bool:
        """Whether a step of about so many rows was observed."""
        return _size(rows) in self._own

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step."""
        size = _size(rows)
        took = math.log(max(seconds, 1e-7))
        self._seen[size] = seen = self._seen.get(size, 0) + 1
        if not self._own:
            self._common, self._own[size] = took, 0.0
        elif size not in self._own:
            self._own[size] = took - self._common
        else:
            error = took - self._common - self._own[size]
            error = max(-_OUTLIER, min(_OUTLIER, error))
            self._common += _COMMON * error
            # A size's first step is often slow, and few others put that right if drafts are turned off because of it.
            self._own[size] += max(_OWN, 1.0 / (seen - 0.5)) * error
        sizes = sorted(self._own)
        self._rows = np.array([_rows_of(each) for each in sizes])
        self._logs = np.array([self._own[each] for each in sizes]) - np.log(self._rows + _PLATEAU)

    def relative(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the seconds that steps take, but for a factor that is common to all.

        Args:
            rows: float64 [n]. Something must be known.
        """
        return (rows + _PLATEAU) * np.exp(np.interp(rows, self._rows, self._logs))


def _size(rows: int) -> int:
    return rows if rows <= _FEW else _FEW + round(8.0 * math.log2(rows / _FEW))


def _rows_of(size: int) -> float:
    return float(size) if size <= _FEW else _FEW * 2.0 ** ((size - _FEW) / 8.0)


class Pace:
    """Decides on the number of draft tokens of a step, and when to look again after there were none.

    Attributes:
        times: What steps take.
    """

    def __init__(self) -> None:
        self.times = StepTimes()
        self._pause = self._next_pause = 0
        self._drafted = self._vain = self._trials = 0
        self._look_cost = 0.0
        """What drafting takes, in steps without drafts."""

    def observe(self, rows: int, seconds: float, drafting: float, *, drafts: bool) -> None:
        """Learn from a step.

        Args:
            rows: Tokens that it computed.
            seconds: What it took, proposal included.
            drafting: What the drafter took of that for its proposal; 0: it was not asked.
            drafts: Whether it had any.
        """
        if drafting:
            cost = drafting / max(seconds - drafting, 1e-7)
            self._look_cost += _COMMON * (cost - self._look_cost)
        # Drafts cost what they take to propose; a step that had none would have done without the proposal.
        self.times.observe(rows, seconds if drafts else seconds - drafting)

    def wait(self) -> bool:
        """Whether this step is one to leave out because drafts did not pay."""
        if self._pause:
            self._pause -= 1
            return True
        return False

    def choose(self, chances: npt.NDArray[np.float64], sequences: int, rows: int) -> int:
        """Return how many draft tokens to verify.

        Args:
            chances: float64 [n], of draft tokens, that each and those before it are right; falling.
            sequences: Those that get a token from the step anyway.
            rows: Tokens that the step computes anyway.
        """
        if not len(chances) or not self.times.knows(rows):
            return 0  # what it takes without drafts is what all is compared with
        tokens = sequences + np.concatenate([[0.0], np.cumsum(chances)])
        rates = tokens / self.times.relative(rows + np.arange(len(tokens), dtype=np.float64))
        best = int(rates.argmax())
        if best and rates[best] >= GAIN * rates[0]:
            self._next_pause = self._vain = 0
            self._drafted += 1
            if self._drafted % TRIAL:
                return best
            return 0 if self._drafted % (2 * TRIAL) else min(len(chances), 2 * best)
        self._vain += 1
        trial = min(len(chances), sequences)
        if self._trials < FIRST_TRIALS or self._vain % RARE_TRIAL == 0:
            self._trials += 1
            return trial
        self._next_pause = min(MOST_PAUSE, 2 * self._next_pause + 1)
        self._pause = max(self._next_pause, min(COSTLY_PAUSE, round(self._look_cost / LOOK_SHARE)))
        return 0


def worth_drafting(rate: float) -> int:
    """Return how many tokens to draft where each takes time and is right with this probability: 1 to 8."""
    rate = min(0.99, max(0.01, rate))
    return max(1, min(8, int(math.log(0.25) / math.log(rate))))


class Record:
    """How a sequence's drafts fared: the share of tokens that were right, and that relative to what was promised.

    Args:
        rate: What to expect of the first.
    """

    __slots__ = ("expected", "rate", "right")

    NEWS = 0.15
    PROMISES = 4.0

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.right = self.expected = self.PROMISES

    def chances(
        self, given: npt.NDArray[np.float64] | None, count: int, parents: tuple[int, ...] = ()
    ) -> npt.NDArray[np.float64]:
        """Return how likely each of ``count`` draft tokens and all before it are right.

        Args:
            given: What the drafter says of each if those before it are right.
            count: Draft tokens.
            parents: Of the tokens of a tree; empty: they are a chain.
        """
        if parents:
            told = None if given is None else given.tolist()
            return chances_of(parents, told, self.rate, min(1.0, self.right / self.expected))
        if given is None:
            return np.full(count, self.rate).cumprod()
        return (given * min(1.0, self.right / self.expected)).cumprod()

    def verified(self, drafted: int, accepted: int, promised: float) -> None:
        """Learn from a draft.

        Args:
            drafted: Places that it had tokens for: of a tree, along the tokens that were right.
            accepted: Tokens that were right.
            promised: How many were to be expected.
        """
        for at in range(min(accepted + 1, drafted)):
            self.rate += self.NEWS * ((at < accepted) - self.rate)
        keep = 1.0 - self.NEWS
        self.right = keep * self.right + accepted
        self.expected = max(keep * self.expected + promised, 1e-3)

    def idle(self, usual: float) -> None:
        """Forget a little: what did not pay may pay again."""
        self.rate += 0.005 * (usual - self.rate)
