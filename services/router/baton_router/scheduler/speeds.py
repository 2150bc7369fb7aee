"""Speeds learnt online from what completed requests report: how long prefill, transfer and decode really took.

Each is a line ``milliseconds = base + slope * amount``, fitted by least squares over the latest requests:

- prefill, per prefill instance: from arrival to the first token, without decode's queue and the rest of the transfer,
  over the prompt tokens that were computed and those in flight before them, which count the less the more these are;
- local prefill, per decode instance: to the first token without the queue, over the prompt tokens computed;
- transfer, per pair: what it added after the computation (what overlapped costs nothing), over the KV bytes fetched;
- store, per decode instance: time in fetches, over the KV bytes loaded;
- decode, per decode instance: time between two tokens, over the sequences that ran there.

An instance of which nothing recent is known counts as the mean of its like; before anything is known at all, the priors
hold. So one that was slow once gets another chance after a minute.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

import msgspec

from baton.api.v1 import common_pb2
from baton.types import InstanceId

K = TypeVar("K", bound=Hashable)
L = TypeVar("L")
_KEEP = 0.97
"""Weight of the past per new observation: about the latest 33 count."""
_LEAST_WEIGHT = 0.1
"""So that an instance which got slow is found to be slow also while all that it does waits in a queue."""
_MIN_KNOWN = 3.0
_MIN_OWN = 1.9
"""Observations from which an instance is judged by its own and no longer by its like."""
_MIN_SPREAD = 0.3
"""Standard deviation of the amounts over their mean from which a base can be told from a slope."""
_FRESH_S = 60.0
_MAX_KEYS = 65_536
_MIN_OUTPUT = 2


class Fit(NamedTuple):
    """``milliseconds = base + slope * amount``."""

    base: float
    slope: float

    def at(self, amount: float) -> float:
        """Return the milliseconds that an amount takes."""
        return self.base + self.slope * amount


class LinearFit:
    """Least squares over observations whose weight decays with each new one.

    Args:
        flat: While the amounts hardly differ, take the time as all base instead of all slope.
        at: When it began.

    Attributes:
        known: How many observations it stands on.
        at: When the latest one came.
    """

    __slots__ = ("_fit", "_flat", "_weight", "_x", "_xx", "_xy", "_y", "at", "known")

    def __init__(self, *, flat: bool, at: float) -> None:
        self._flat = flat
        self.known = self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.at = at
        self._fit: Fit | None = Fit(0.0, 0.0)

    def add(self, amount: float, ms: float, at: float, weight: float = 1.0) -> None:
        """Take an observation; weight: of its squared error, above 0."""
        self.known = _KEEP * self.known + 1.0
        self._weight = _KEEP * self._weight + weight
        self._x = _KEEP * self._x + weight * amount
        self._y = _KEEP * self._y + weight * ms
        self._xx = _KEEP * self._xx + weight * amount * amount
        self._xy = _KEEP * self._xy + weight * amount * ms
        self.at = at
        self._fit = None

    @property
    def fit(self) -> Fit:
        """The line through them; fitted when it is read, which is less often than there are observations."""
        if self._fit is None:
            self._fit = self._solve()
        return self._fit

    @property
    def mean(self) -> float:
        """The mean time, whatever the amounts."""
        return self._y / self._weight

    def _solve(self) -> Fit:
        n, x, y = self._weight, self._x / self._weight, self._y / self._weight
        variance = max(0.0, self._xx / n - x * x)
        if self.known < _MIN_KNOWN or variance < (_MIN_SPREAD * x) ** 2 or variance == 0.0:
            return Fit(y, 0.0) if self._flat or x <= 0 else Fit(0.0, y / x)
        slope = (self._xy / n - x * y) / variance
        if slope <= 0.0:
            return Fit(y, 0.0)
        base = y - slope * x
        return Fit(base, slope) if base >= 0.0 else Fit(0.0, self._xy / self._xx)


class LinearFits(Generic[K]):
    """One line per key and one over all keys.

    Args:
        prior: Holds until anything is known.
        now: Monotonic clock, in seconds.
        flat: See :class:`LinearFit`.
    """

    def __init__(self, prior: Fit, now: Callable[[], float], *, flat: bool = False) -> None:
        self._prior, self._now, self._flat = prior, now, flat
        self._all = LinearFit(flat=flat, at=0.0)
        self._lines: OrderedDict[K, LinearFit] = OrderedDict()

    def add(self, key: K, amount: float, ms: float, weight: float = 1.0) -> None:
        """Take an observation; the number of keys is bounded, those not heard of for longest go first."""
        now = self._now()
        line = self._lines.get(key)
        if line is None or now - line.at > _FRESH_S:
            line = self._lines[key] = LinearFit(flat=self._flat, at=now)
        self._lines.move_to_end(key)
        line.add(amount, ms, now, weight)
        self._all.add(amount, ms, now, weight)
        while len(self._lines) > _MAX_KEYS:
            self._lines.popitem(last=False)

    def get(self, keys: Iterable[K]) -> list[Fit]:
        """Return what is known of each key."""
        return self._own(keys, self._all.fit if self._all.known else self._prior)

    def known(self, keys: Iterable[K]) -> list[Fit | None]:
        """Return what was measured of each key, or of its like, lately; no prior stands in."""
        every = self._all
        return self._own(keys, every.fit if every.known >= _MIN_OWN and every.at >= self._now() - _FRESH_S else None)

    def _own(self, keys: Iterable[K], like: L) -> list[Fit | L]:
        known, oldest = self._lines.get, self._now() - _FRESH_S
        return [
            line.fit if (line := known(key)) is not None and line.at >= oldest and line.known >= _MIN_OWN else like
            for key in keys
        ]


class ServedRequest(msgspec.Struct):
    """A request as the router saw it, from placement to its end.

    Attributes:
        trace: What the instances said of it.
        prefill: The prefill instance it was placed on; empty: none.
        decode: The decode instance.
        ahead: Work in flight on the prefill instance when it was placed, in tokens.
        running: Sequences in flight on the decode instance when it was placed, its own included.
        tokens: Tokens generated, per sequence.
        decode_s: From the first tokens to the last ones.
    """

    trace: common_pb2.RequestTrace
    prefill: InstanceId | str
    decode: InstanceId
    ahead: float
    running: int
    tokens: float = 0.0
    decode_s: float = 0.0


class Speeds:
    """What is known of all instances' speeds.

    Args:
        now: Monotonic clock, in seconds; tests and replays bring their own.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.prefill: LinearFits[str] = LinearFits(Fit(5.0, 0.2), now)
        self.local: LinearFits[str] = LinearFits(Fit(2.0, 0.2), now)
        self.transfer: LinearFits[tuple[str, str]] = LinearFits(Fit(2.0, 1e-6), now)
        self.store: LinearFits[str] = LinearFits(Fit(2.0, 1e-6), now)
        self.decode: LinearFits[str] = LinearFits(Fit(20.0, 0.0), now, flat=True)
        self.output = LinearFit(flat=True, at=0.0)

    @property
    def output_tokens(self) -> float:
        """Tokens that a request generates, on average."""
        return self.output.mean if self.output.known else 128.0

    def observe(self, served: ServedRequest) -> None:
        """Learn from a request that was served."""
        trace = served.trace
        if trace.path == common_pb2.PREFILL_PATH_REMOTE and trace.prefill_instance:
            self._remote(served, trace)
        elif trace.path == common_pb2.PREFILL_PATH_LOCAL:
            if trace.recomputed_tokens and trace.ttft_us:
                self.local.add(served.decode, trace.recomputed_tokens, max(0, trace.ttft_us - trace.queue_us) / 1000)
        elif trace.path == common_pb2.PREFILL_PATH_STORE and trace.kv_bytes and trace.transfer_us:
            self.store.add(served.decode, trace.kv_bytes, trace.transfer_us / 1000)
        if served.tokens >= _MIN_OUTPUT and served.decode_s > 0:
            self.decode.add(served.decode, served.running, 1000 * served.decode_s / (served.tokens - 1))
        if served.tokens:
            self.output.add(0.0, served.tokens, self.now())

    def _remote(self, served: ServedRequest, trace: common_pb2.RequestTrace) -> None:
        if trace.kv_bytes:
            pair = (trace.prefill_instance, served.decode)
            self.transfer.add(pair, trace.kv_bytes, trace.exposed_us / 1000)
        if trace.prefill_instance != served.prefill or not trace.ttft_us or trace.failed_prefills:
            return  # another instance took it: what was ahead of it there is unknown
        computed = trace.prompt_tokens - max(trace.prefill_cached_tokens, trace.cached_tokens)
        ms = (trace.ttft_us - trace.queue_us - trace.exposed_us) / 1000
        if computed > 0 and ms > 0:
            # How much of what was ahead had been computed by then is unknown, so the error grows with it.
            amount = computed + served.ahead
            self.prefill.add(served.prefill, amount, ms, max(_LEAST_WEIGHT, (computed / amount) ** 2))
