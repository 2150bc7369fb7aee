"""Pipes that are left alone for a while because nothing came over them although their peer could send.

A firewall or a broken link may swallow what a connection carries while both ends, and everything else between them,
are well. Each request that tries it again waits for nothing, so the pair of instance and kind of pipe rests, longer
each time, and then one request tries it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

log = logging.getLogger(__name__)
FIRST_REST_S = 5.0
LONGEST_REST_S = 60.0
_MAX_KNOWN = 1024


class _State(Enum):
    RESTS = auto()
    TRIED = auto()
    WORKS = auto()


@dataclass(slots=True)
class _Rest:
    """One kind of pipe to one instance, over which nothing came.

    Attributes:
        state: Whether it is left alone, tried by one caller, or works again.
        until: End of the rest or of the trial, or when it worked again.
        length_s: Length of the latest rest, in seconds.
    """

    state: _State
    until: float
    length_s: float


class PipeRests:
    """Which kinds of pipe to which instances are left alone, and until when. Thread safe.

    Args:
        clock: Monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rests: dict[tuple[str, str], _Rest] = {}
        self._stalls: Counter[str] = Counter()

    def record_stall(self, instance: str, kind: str) -> None:
        """Leave a pipe alone, twice as long as before if it stalled lately too."""
        now = self._clock()
        with self._lock:
            self._stalls[kind] += 1
            rest = self._rests.pop((instance, kind), None)
            length_s = FIRST_REST_S
            if rest is not None:
                if rest.state is _State.RESTS and now < rest.until:  # of several reads at once
                    self._rests[instance, kind] = rest
                    return
                if now < rest.until + LONGEST_REST_S:
                    length_s = min(2 * rest.length_s, LONGEST_REST_S)
            self._rests[instance, kind] = _Rest(_State.RESTS, now + length_s, length_s)
            if len(self._rests) > _MAX_KNOWN:
                del self._rests[next(iter(self._rests))]
        log.warning("nothing came over the %s pipe to %s: it is left alone for %g s", kind, instance, length_s)

    def record_success(self, instance: str, kind: str) -> None:
        """End a pipe's rest. A stall soon after still counts as one in a row: little may pass where much does not."""
        if (instance, kind) not in self._rests:
            return
        with self._lock:
            rest = self._rests.get((instance, kind))
            if rest is None or rest.state is _State.WORKS or self._rests_now(rest):
                return
            rest.state = _State.WORKS
            rest.until = self._clock()
        log.warning("the %s pipe to %s works again", kind, instance)

    def is_resting(self, instance: str, kind: str) -> bool:
        """Whether a pipe must not be connected now."""
        rest = self._rests.get((instance, kind))
        return rest is not None and self._rests_now(rest)

    def admits(self, instance: str, kind: str) -> bool:
        """Whether a caller may use a pipe; the first one after a rest is to try it, and others wait for the result."""
        if (instance, kind) not in self._rests:
            return True
        now = self._clock()
        with self._lock:
            rest = self._rests.get((instance, kind))
            if rest is None or rest.state is _State.WORKS:
                return True
            if now < rest.until:
                return False
            rest.state = _State.TRIED
            rest.until = now + FIRST_REST_S
            return True

    def _rests_now(self, rest: _Rest) -> bool:
        return rest.state is _State.RESTS and self._clock() < rest.until

    def num_stalls(self) -> dict[str, int]:
        """Return how many reads stalled, by kind of pipe."""
        with self._lock:
            return dict(self._stalls)
