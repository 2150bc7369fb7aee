"""The highest rate at which the targets are kept: doubled until they are not, then bisected."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_START_RATE = 1.0
_LOWEST_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Knee:
    """What a search found.

    Attributes:
        rate: Highest rate that kept the targets; ``None``: none did.
        broke_at: Lowest rate that did not; ``None``: all did, up to the highest allowed.
        tried: Loads that it took.
    """

    rate: float | None
    broke_at: float | None
    tried: int


async def find_knee(
    keeps: Callable[[float], Awaitable[bool]], *, start: float | None, most: float, precision: float
) -> Knee:
    """Search.

    Args:
        keeps: Puts a load at a rate, and says whether it kept the targets.
        start: First rate tried, requests per second; ``None``: 1.
        most: Highest rate tried.
        precision: Width of the bracket at which the search ends, as a share of its lower end.
    """
    tried = 0
    low: float | None = None
    high: float | None = None
    rate = min(start or _START_RATE, most)
    while low is None or high is None:
        tried += 1
        if await keeps(rate):
            low = rate
            if low >= most:
                return Knee(low, None, tried)
            rate = min(2 * rate, most)
        else:
            high = rate
            if high <= _LOWEST_RATE:
                return Knee(None, high, tried)
            rate /= 2
    while high - low > precision * low:
        middle = (low + high) / 2
        tried += 1
        if await keeps(middle):
            low = middle
        else:
            high = middle
    return Knee(low, high, tried)
