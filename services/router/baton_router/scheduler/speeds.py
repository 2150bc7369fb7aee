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
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from baton.api.v1 import common_pb2
from baton.types import InstanceId

K = TypeVar("K", str, tuple[str, str])
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
_MAX_NAMES = 4096
FloatArray = npt.NDArray[np.float64]


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


class _Row(NamedTuple):
    """Lines side by side; never changed, so whoever has one may keep it.

    Attributes:
        bases: Of the lines.
        slopes: Of the lines.
        at: When the latest observation came; ``-inf``: too little is known.
        least: The least base and the least slope.
    """

    bases: FloatArray
    slopes: FloatArray
    at: FloatArray
    least: tuple[float, float] = (0.0, 0.0)

    def wider(self, size: int) -> _Row:
        """Return a copy with room for so many columns; nothing is known of the new ones."""
        row = _Row(np.full(size, np.inf), np.full(size, np.inf), np.full(size, -np.inf), self.least)
        for old, new in zip(self[:3], row[:3], strict=True):
            new[: old.size] = old
        return row


_EMPTY = _Row(np.zeros(0), np.zeros(0), np.zeros(0))


class Lines(NamedTuple):
    """What was known at one moment; later observations do not change it.

    Attributes:
        columns: The columns that were asked for; -1: nothing is known of it.
        rows: The rows that were asked for; ``None``: nothing is known of it.
        like: Stands in where nothing recent is known.
        oldest: What was observed before is too old.
    """

    columns: npt.NDArray[np.intp]
    rows: list[_Row | None]
    like: Fit
    oldest: float

    def row(self, at: int = 0) -> tuple[FloatArray, FloatArray]:
        """Return bases and slopes of a row, an entry per column."""
        row, columns = self.rows[at], self.columns
        if row is None:
            return np.full(columns.size, self.like.base), np.full(columns.size, self.like.slope)
        fresh = row.at[columns] >= self.oldest
        bases = np.where(fresh, row.bases[columns], self.like.base)
        return bases, np.where(fresh, row.slopes[columns], self.like.slope)

    def least(self) -> tuple[FloatArray, FloatArray]:
        """Return per row the least base and the least slope that any of its lines may have."""
        least = [self.like if row is None else row.least for row in self.rows]
        bases, slopes = np.array(least).reshape(-1, 2).T
        return np.minimum(bases, self.like.base), np.minimum(slopes, self.like.slope)


class _Table:
    """Lines by row and column. The last column of every row is of those of which nothing is known."""

    def __init__(self) -> None:
        self._columns: dict[str, int] = {}
        self._rows: dict[str, _Row] = {}
        self._asked: tuple[Sequence[str], npt.NDArray[np.intp]] | None = None
        """The columns that were asked for last, which mostly are the next ones, too."""

    def set(self, key: tuple[str, str], line: LinearFit) -> None:
        """Take a line that has changed."""
        column, row = key
        if max(len(self._columns), len(self._rows)) >= _MAX_NAMES:
            self._columns.clear()  # names come and go: those in use are soon back
            self._rows.clear()
            self._asked = None
        at = self._columns.get(column, -1)
        if at < 0:
            at = self._columns[column] = len(self._columns)
            self._asked = None
        known = self._rows.get(row, _EMPTY)
        known = known.wider(known.at.size if at + 1 < known.at.size else 2 * (at + 1))
        known.bases[at], known.slopes[at] = line.fit
        known.at[at] = line.at if line.known >= _MIN_OWN else -np.inf
        self._rows[row] = known._replace(least=(float(known.bases.min()), float(known.slopes.min())))

    def find(self, columns: Sequence[str], rows: Sequence[str]) -> tuple[npt.NDArray[np.intp], list[_Row | None]]:
        """Return where columns are, and rows."""
        found = [self._rows.get(row) for row in rows]
        for at, known in enumerate(found):
            if known is not None and known.at.size <= len(self._columns):
                found[at] = self._rows[rows[at]] = known.wider(2 * len(self._columns))
        if self._asked is None or self._asked[0] is not columns:
            place = self._columns.get
            self._asked = columns, np.array([place(column, -1) for column in columns], np.intp)
        return self._asked[1], found


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
        self._table = _Table()
        self._kept: tuple[Sequence[str], float, tuple[FloatArray, FloatArray]] | None = None

    def add(self, key: K, amount: float, ms: float, weight: float = 1.0) -> None:
        """Take an observation; the number of keys is bounded, those not heard of for longest go first."""
        now, self._kept = self._now(), None
        line = self._lines.get(key)
        if line is None or now - line.at > _FRESH_S:
            line = self._lines[key] = LinearFit(flat=self._flat, at=now)
        self._lines.move_to_end(key)
        line.add(amount, ms, now, weight)
        self._all.add(amount, ms, now, weight)
        self._table.set(key if isinstance(key, tuple) else (key, ""), line)
        while len(self._lines) > _MAX_KEYS:
            self._lines.popitem(last=False)

    @property
    def measured(self) -> bool:
        """Whether anything was observed at all; else the prior holds."""
        return self._all.known > 0

    def lines(self, columns: Sequence[str], rows: Sequence[str] = ("",)) -> Lines:
        """Return what is known of many keys at once: of every pair of a column and a row, or of every column."""
        like = self._all.fit if self._all.known else self._prior
        return Lines(*self._table.find(columns, rows), like, self._now() - _FRESH_S)

    def arrays(self, columns: Sequence[str]) -> tuple[FloatArray, FloatArray]:
        """Return bases and slopes of every column; the latest answer holds until something is observed, or gets old."""
        kept, now = self._kept, self._now()
        if kept is None or kept[0] is not columns or now >= kept[1]:
            lines = self.lines(columns)
            row = lines.rows[0]
            ages = row.at[row.at >= lines.oldest] if row is not None else np.zeros(0)
            until = float(ages.min()) + _FRESH_S if ages.size else np.inf
            kept = self._kept = columns, until, lines.row()
        return kept[2]

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
