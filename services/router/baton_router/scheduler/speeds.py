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

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from baton.api.v1 import common_pb2
from baton.native import address_of
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
_MAX_ASKED = 8
"""Lists of names whose places are remembered: those of the roster, and of parts of it."""
_ALONE = ("",)
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
        n = self._weight
        x = self._x / self._weight
        y = self._y / self._weight
        variance = max(0.0, self._xx / n - x * x)
        if self.known < _MIN_KNOWN or variance < (_MIN_SPREAD * x) ** 2 or variance == 0.0:
            return Fit(y, 0.0) if self._flat or x <= 0 else Fit(0.0, y / x)
        slope = (self._xy / n - x * y) / variance
        if slope <= 0.0:
            return Fit(y, 0.0)
        base = y - slope * x
        return Fit(base, slope) if base >= 0.0 else Fit(0.0, self._xy / self._xx)


class _Row:
    """Lines side by side; never changed, so whoever has one may keep it.

    Attributes:
        block: Bases, slopes and when the latest observation came, ``-inf``: too little is known; ``[3, columns]``.
        place: Where that is in memory, and how many columns there are.
    """

    __slots__ = ("block", "place")

    def __init__(self, block: FloatArray) -> None:
        self.block = block
        self.place = address_of(block), block.shape[1]

    def least(self) -> FloatArray:
        """Return the least base and the least slope."""
        least: FloatArray = np.minimum.reduce(self.block[:2], 1)
        return least

    def with_line(self, at: int, line: LinearFit) -> _Row:
        """Return a copy with another line in one column, and room for some more."""
        size = self.block.shape[1]
        if at < size:
            block = self.block.copy()
        else:
            block = _nothing(2 * (at + 1))
            block[:, :size] = self.block
        known = line.at if line.known >= _MIN_OWN else -math.inf
        block[0, at], block[1, at], block[2, at] = *line.fit, known
        return _Row(block)


def _nothing(size: int) -> FloatArray:
    """Return lines of which nothing is known."""
    block = np.full((3, size), np.inf)
    block[2] = -np.inf
    return block


_EMPTY = _Row(_nothing(1))


class _Asked:
    """The rows that were asked for together, kept up to date for as long as the same ones are asked for.

    Attributes:
        names: Their names.
        rows: The rows; ``None``: nothing is known of it. Replaced when one changes, so whoever has it may keep it.
        places: Where each one's block is in memory and its number of columns, int64; 0: nothing is known.
        least: Each one's least base and least slope.
    """

    def __init__(self, names: Sequence[str], known: Mapping[str, _Row]) -> None:
        self.names = names
        self.rows: list[_Row | None] = [None] * len(names)
        self.places = np.zeros((len(names), 2), np.int64)
        self.least = np.full((len(names), 2), np.inf)
        self.addresses: tuple[int, int] = (address_of(self.places), address_of(self.least))
        self._at: dict[str, list[int]] = {}
        for at, name in enumerate(names):
            self._at.setdefault(name, []).append(at)
        for name in self._at:
            if name in known:
                self.set(name, known[name])

    def set(self, name: str, row: _Row) -> None:
        """Take a row that has changed, if it is among them."""
        for at in self._at.get(name, ()):
            self.rows = [*self.rows[:at], row, *self.rows[at + 1 :]]
            self.places[at] = row.place
            if name:  # a table of one row has no pairs
                self.least[at] = row.least()


class Lines(NamedTuple):
    """What was known at one moment; later observations do not change it.

    Attributes:
        columns: The columns that were asked for; -1: nothing is known of it.
        rows: The rows that were asked for; ``None``: nothing is known of it.
        like: Stands in where nothing recent is known.
        oldest: What was observed before is too old.
        places: In memory: the columns; each row's block and size (int64); each row's least base and slope. The latter
            two are those of now.
        kept: Keeps these.
    """

    columns: npt.NDArray[np.int64]
    rows: list[_Row | None]
    like: Fit
    oldest: float
    places: tuple[int, int, int]
    kept: _Asked

    def row(self, at: int = 0) -> tuple[FloatArray, FloatArray]:
        """Return bases and slopes of a row, an entry per column."""
        row = self.rows[at]
        columns = self.columns
        if row is None:
            return np.full(columns.size, self.like.base), np.full(columns.size, self.like.slope)
        inside = np.where(columns < row.block.shape[1], columns, -1)
        bases, slopes, at_s = row.block[:, inside]
        fresh = (inside >= 0) & (at_s >= self.oldest)
        return np.where(fresh, bases, self.like.base), np.where(fresh, slopes, self.like.slope)

    def packed(self) -> tuple[int, int, int, float, float, float]:
        """Return the only row as ``struct lines`` of ``native/placement.c`` has it."""
        row = self.rows[0]
        place, size = row.place if row is not None else (0, 0)
        return place, size, self.places[0], self.like.base, self.like.slope, self.oldest


class _Table:
    """Lines by row and column."""

    def __init__(self) -> None:
        self._columns: dict[str, int] = {}
        self._rows: dict[str, _Row] = {}
        self._asked_columns: dict[int, tuple[Sequence[str], npt.NDArray[np.int64], int]] = {}
        """The columns that were asked for lately, by the identity of their names, and where they are in memory."""
        self._asked_rows: dict[int, _Asked] = {}

    def set(self, key: tuple[str, str], line: LinearFit) -> None:
        """Take a line that has changed."""
        column, name = key
        if max(len(self._columns), len(self._rows)) >= _MAX_NAMES:
            self._columns.clear()  # names come and go: those in use are soon back
            self._rows.clear()
            self._asked_columns.clear()
            self._asked_rows.clear()
        at = self._columns.get(column, -1)
        if at < 0:
            at = self._columns[column] = len(self._columns)
            self._asked_columns.clear()
        row = self._rows[name] = self._rows.get(name, _EMPTY).with_line(at, line)
        for asked in self._asked_rows.values():
            asked.set(name, row)

    def columns(self, names: Sequence[str]) -> tuple[npt.NDArray[np.int64], int]:
        """Return where columns are, and where that is in memory."""
        found = self._asked_columns.get(id(names))
        if found is None:
            if len(self._asked_columns) >= _MAX_ASKED:
                self._asked_columns.clear()
            place = self._columns.get
            at = np.array([place(name, -1) for name in names], np.int64)
            found = self._asked_columns[id(names)] = names, at, address_of(at)
        return found[1:]

    def rows(self, names: Sequence[str]) -> _Asked:
        found = self._asked_rows.get(id(names))
        if found is None:
            if len(self._asked_rows) >= _MAX_ASKED:
                self._asked_rows.clear()
            found = self._asked_rows[id(names)] = _Asked(names, self._rows)
        return found


class LinearFits(Generic[K]):
    """One line per key and one over all keys.

    Args:
        prior: Holds until anything is known.
        now: Monotonic clock, in seconds.
        flat: See :class:`LinearFit`.
    """

    def __init__(self, prior: Fit, now: Callable[[], float], *, flat: bool = False) -> None:
        self._prior = prior
        self._now = now
        self._flat = flat
        self._all = LinearFit(flat=flat, at=0.0)
        self._lines: OrderedDict[K, LinearFit] = OrderedDict()
        self._table = _Table()

    def add(self, key: K, amount: float, ms: float, weight: float = 1.0) -> None:
        """Take an observation; the number of keys is bounded, those not heard of for longest go first."""
        now = self._now()
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

    def lines(self, columns: Sequence[str], rows: Sequence[str] = _ALONE) -> Lines:
        """Return what is known of many keys at once: of every pair of a column and a row, or of every column."""
        like = self._all.fit if self._all.known else self._prior
        at, place = self._table.columns(columns)
        asked: _Asked = self._table.rows(rows)
        return Lines(at, asked.rows, like, self._now() - _FRESH_S, (place, *asked.addresses), asked)

    def get(self, keys: Iterable[K]) -> list[Fit]:
        """Return what is known of each key."""
        return self._own(keys, self._all.fit if self._all.known else self._prior)

    def known(self, keys: Iterable[K]) -> list[Fit | None]:
        """Return what was measured of each key, or of its like, lately; no prior stands in."""
        every = self._all
        return self._own(keys, every.fit if every.known >= _MIN_OWN and every.at >= self._now() - _FRESH_S else None)

    def _own(self, keys: Iterable[K], like: L) -> list[Fit | L]:
        known = self._lines.get
        oldest = self._now() - _FRESH_S
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
