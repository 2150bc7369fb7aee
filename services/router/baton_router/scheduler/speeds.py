"""Speeds learnt online from what completed requests report: how long prefill, transfer and decode really took.

Each is a line ``milliseconds = base + slope * amount``, fitted by least squares over the latest requests:

- prefill, per prefill instance: from arrival to the first token, without decode's queue and the rest of the transfer,
  over the work (:class:`PromptWork`) of the prompt tokens that were computed and of those in flight before them;
  observations with much of the latter weigh less;
- local prefill, per decode instance: to the first token without the queue, over the work of the tokens computed;
- transfer, per pair: the time added after the computation (overlapping time costs nothing), over the KV bytes fetched;
- store, per decode instance: time in fetches, over the KV bytes loaded;
- decode, per decode instance: time between two tokens, over the sequences that ran there.

An instance without recent observations counts as the mean of its kind; before there is any observation, a prior is
used. So an instance that was slow once gets another chance after a minute.
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
"""Factor of earlier observations' weight per new one: about the latest 33 count."""
_LEAST_WEIGHT = 0.1
"""Minimum weight, so that an instance that became slow is recognized even if all its requests wait in a queue."""
_MIN_KNOWN = 3.0
_MIN_OWN = 1.9
"""Weighted number of observations from which an instance's own line is used and no longer that of all."""
_MIN_SPREAD = 0.3
"""Standard deviation of the amounts over their mean from which base and slope can be separated."""
_FRESH_S = 60.0
_MAX_KEYS = 65_536
_MIN_OUTPUT = 2
_MAX_NAMES = 4096
_MAX_CACHED = 8
"""Lists of names whose columns and rows are cached: those of all instances, and of parts of them."""
_ALONE = ("",)
FloatArray = npt.NDArray[np.float64]
Amount = TypeVar("Amount", float, FloatArray)


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
        flat: While the amounts hardly differ, fit the time as all base instead of all slope.
        at: Time of its creation, in seconds.

    Attributes:
        known: Number of observations, weighted by age.
        at: Time of the latest observation, in seconds.
    """

    __slots__ = ("_fit", "_flat", "_weight", "_x", "_xx", "_xy", "_y", "at", "known")

    def __init__(self, *, flat: bool, at: float) -> None:
        self._flat = flat
        self.known = self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.at = at
        self._fit: Fit | None = Fit(0.0, 0.0)

    def add(self, amount: float, ms: float, at: float, weight: float = 1.0) -> None:
        """Add an observation, with the weight of its squared error (above 0)."""
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
        """The fitted line; computed on reading, which happens less often than observations are added."""
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
    """The lines of one row of a table; immutable.

    Attributes:
        block: Bases, slopes and times of the latest observations (``-inf``: too few), ``[3, columns]``.
        memory: Address of the block and its number of columns, the fields of ``kernels.LINE_ROW``.
    """

    __slots__ = ("block", "memory")

    def __init__(self, block: FloatArray) -> None:
        self.block = block
        self.memory = address_of(block), block.shape[1]

    def least(self) -> FloatArray:
        """Return the least base and the least slope."""
        least: FloatArray = np.minimum.reduce(self.block[:2], 1)
        return least

    def with_line(self, at: int, line: LinearFit) -> _Row:
        """Return a copy with another line in one column, with spare columns if it has to grow."""
        size = self.block.shape[1]
        if at < size:
            block = self.block.copy()
        else:
            block = _unknown(2 * (at + 1))
            block[:, :size] = self.block
        known = line.at if line.known >= _MIN_OWN else -math.inf
        block[:, at] = (*line.fit, known)
        return _Row(block)


def _unknown(size: int) -> FloatArray:
    """Return the block of lines without observations."""
    block = np.full((3, size), np.inf)
    block[2] = -np.inf
    return block


_EMPTY = _Row(_unknown(1))


class _RowSet:
    """Several rows of a table, kept up to date as long as they are cached.

    Attributes:
        names: Names of the rows.
        rows: The rows; ``None``: no observation. The list is replaced, never changed.
        memory: Each row's address and number of columns, int64; 0: no observation.
        least: Each row's least base and least slope.
    """

    def __init__(self, names: Sequence[str], known: Mapping[str, _Row]) -> None:
        self.names = names
        self.rows: list[_Row | None] = [None] * len(names)
        self.memory = np.zeros((len(names), 2), np.int64)
        self.least = np.full((len(names), 2), np.inf)
        self.addresses: tuple[int, int] = (address_of(self.memory), address_of(self.least))
        self._at: dict[str, list[int]] = {}
        for at, name in enumerate(names):
            self._at.setdefault(name, []).append(at)
        for name in self._at:
            if name in known:
                self.set(name, known[name])

    def set(self, name: str, row: _Row) -> None:
        """Replace a row that has changed, if it is among them."""
        for at in self._at.get(name, ()):
            self.rows = [*self.rows[:at], row, *self.rows[at + 1 :]]
            self.memory[at] = row.memory
            if name:  # a table of one row has no pairs
                self.least[at] = row.least()


class Lines(NamedTuple):
    """Lines of a table at one moment; later observations do not change them.

    Attributes:
        columns: Positions of the requested columns; -1: no observation.
        rows: The requested rows; ``None``: no observation.
        like: Line used where there is no recent observation.
        oldest: Time before which an observation is too old, in seconds.
        addresses: Addresses of the columns, of each row's address and size (int64), and of each row's least base and
            slope. The latter two follow later observations.
        row_set: Owner of the memory of these.
    """

    columns: npt.NDArray[np.int64]
    rows: list[_Row | None]
    like: Fit
    oldest: float
    addresses: tuple[int, int, int]
    row_set: _RowSet

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
        """Return the only row as the fields of ``kernels.LINES``."""
        row = self.rows[0]
        address, size = row.memory if row is not None else (0, 0)
        return address, size, self.addresses[0], self.like.base, self.like.slope, self.oldest


class _Table:
    """Lines by row and column."""

    def __init__(self) -> None:
        self._columns: dict[str, int] = {}
        self._rows: dict[str, _Row] = {}
        self._cached_columns: dict[int, tuple[Sequence[str], npt.NDArray[np.int64], int]] = {}
        """Names, positions and their address, by the identity of the list of names."""
        self._cached_rows: dict[int, _RowSet] = {}

    def set(self, key: tuple[str, str], line: LinearFit) -> None:
        """Replace a line that has changed."""
        column, name = key
        if max(len(self._columns), len(self._rows)) >= _MAX_NAMES:
            self._columns.clear()  # names come and go: those in use are soon back
            self._rows.clear()
            self._cached_columns.clear()
            self._cached_rows.clear()
        at = self._columns.get(column, -1)
        if at < 0:
            at = self._columns[column] = len(self._columns)
            self._cached_columns.clear()
        row = self._rows[name] = self._rows.get(name, _EMPTY).with_line(at, line)
        for row_set in self._cached_rows.values():
            row_set.set(name, row)

    def columns(self, names: Sequence[str]) -> tuple[npt.NDArray[np.int64], int]:
        """Return the positions of columns, and the address of these."""
        entry = self._cached_columns.get(id(names))
        if entry is None:
            if len(self._cached_columns) >= _MAX_CACHED:
                self._cached_columns.clear()
            position = self._columns.get
            at = np.array([position(name, -1) for name in names], np.int64)
            entry = self._cached_columns[id(names)] = names, at, address_of(at)
        return entry[1:]

    def rows(self, names: Sequence[str]) -> _RowSet:
        row_set = self._cached_rows.get(id(names))
        if row_set is None:
            if len(self._cached_rows) >= _MAX_CACHED:
                self._cached_rows.clear()
            row_set = self._cached_rows[id(names)] = _RowSet(names, self._rows)
        return row_set


class LinearFits(Generic[K]):
    """One line per key and one over all keys.

    Args:
        prior: Line used until there is an observation.
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
        """Add an observation. The number of keys is bounded; the one observed longest ago is dropped first."""
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
        """Whether there is any observation; else the prior is used."""
        return self._all.known > 0

    def lines(self, columns: Sequence[str], rows: Sequence[str] = _ALONE) -> Lines:
        """Return the lines of many keys at once: of every pair of a column and a row, or of every column."""
        like = self._all.fit if self._all.known else self._prior
        at, address = self._table.columns(columns)
        row_set: _RowSet = self._table.rows(rows)
        return Lines(at, row_set.rows, like, self._now() - _FRESH_S, (address, *row_set.addresses), row_set)

    def get(self, keys: Iterable[K]) -> list[Fit]:
        """Return the line of each key: its own if that is known, else that of all, else the prior."""
        return self._own(keys, self._all.fit if self._all.known else self._prior)

    def columns(self, keys: Sequence[K]) -> tuple[FloatArray, FloatArray]:
        """Return the bases and the slopes of the keys' lines."""
        lines = np.array(self.get(keys)).reshape(len(keys), 2)
        return lines[:, 0], lines[:, 1]

    def times(self, keys: Sequence[K], amounts: float | FloatArray) -> FloatArray:
        """Return the milliseconds that an amount takes with each key; one amount for all, or an array."""
        base, slope = self.columns(keys)
        times: FloatArray = base + slope * amounts
        return times

    def known(self, keys: Iterable[K]) -> list[Fit | None]:
        """Return the recent line of each key, or of all keys; ``None`` where there is neither, instead of the prior."""
        every = self._all
        return self._own(keys, every.fit if every.known >= _MIN_OWN and every.at >= self._now() - _FRESH_S else None)

    def _own(self, keys: Iterable[K], like: L) -> list[Fit | L]:
        known = self._lines.get
        oldest = self._now() - _FRESH_S
        return [
            line.fit if (line := known(key)) is not None and line.at >= oldest and line.known >= _MIN_OWN else like
            for key in keys
        ]


class PromptWork:
    """The work of computing a prompt: its tokens, those that attend to many others weighted more.

    A token that attends to ``context`` others takes ``1 + context / half`` times as long as the first one. That depends
    on the model, not on the instance, so one number is learnt for all: by least squares of relative errors over the
    latest prompts that nothing was ahead of.

    Attributes:
        half: Attended tokens at which a token takes twice as long.
    """

    _PRIOR = 50_000.0
    """Of Llama 3.1 70B; 30,000 for 8B, 100,000 for 405B."""

    def __init__(self) -> None:
        self.half = self._PRIOR
        self._tokens = self._mixed = self._pairs = 0.0
        """Sums of products of tokens per millisecond and pairs of tokens per millisecond."""
        self._token_sum = self._pair_sum = 0.0

    def of(self, matched: Amount, total: float) -> Amount:
        """Return the work of computing a prompt's tokens after ``matched``, in tokens without context."""
        return (total - matched) * (1.0 + (total + matched) / (2.0 * self.half))

    def add(self, matched: float, total: float, ms: float) -> None:
        """Learn from the time of computing a prompt's tokens after ``matched``."""
        tokens = (total - matched) / ms
        pairs = tokens * (total + matched) / 2
        self._tokens = _KEEP * self._tokens + tokens * tokens
        self._mixed = _KEEP * self._mixed + tokens * pairs
        self._pairs = _KEEP * self._pairs + pairs * pairs
        self._token_sum = _KEEP * self._token_sum + tokens
        self._pair_sum = _KEEP * self._pair_sum + pairs
        # Milliseconds per token and per pair, both times the determinant; prompts of one length do not tell them apart.
        determinant = self._tokens * self._pairs - self._mixed * self._mixed
        token = self._pairs * self._token_sum - self._mixed * self._pair_sum
        pair = self._tokens * self._pair_sum - self._mixed * self._token_sum
        if determinant > _MIN_SPREAD**2 * self._tokens * self._pairs and token > 0 and pair > 0:
            self.half = min(max(token / pair, 1e3), 1e7)


class ServedRequest(msgspec.Struct):
    """A request as the router saw it, from placement to its end.

    Attributes:
        trace: Trace reported by the instances.
        prefill: Name of the prefill instance it was placed on; empty: none.
        decode: Name of the decode instance.
        ahead: Work in flight on the prefill instance when it was placed, in tokens.
        running: Sequences in flight on the decode instance when it was placed, its own included.
        tokens: Tokens generated, per sequence.
        decode_s: Seconds from the first tokens to the last ones.
    """

    trace: common_pb2.RequestTrace
    prefill: InstanceId | str
    decode: InstanceId
    ahead: float
    running: int
    tokens: float = 0.0
    decode_s: float = 0.0


class Speeds:
    """Learnt speeds of all instances.

    Args:
        now: Monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.prefill: LinearFits[str] = LinearFits(Fit(5.0, 0.2), now)
        self.local: LinearFits[str] = LinearFits(Fit(2.0, 0.2), now)
        self.transfer: LinearFits[tuple[str, str]] = LinearFits(Fit(2.0, 1e-6), now)
        self.store: LinearFits[str] = LinearFits(Fit(2.0, 1e-6), now)
        self.decode: LinearFits[str] = LinearFits(Fit(20.0, 0.0), now, flat=True)
        self.output = LinearFit(flat=True, at=0.0)
        self.work = PromptWork()

    @property
    def output_tokens(self) -> float:
        """Mean number of tokens that a request generates."""
        return self.output.mean if self.output.known else 128.0

    def observe(self, served: ServedRequest) -> None:
        """Learn from a request that was served."""
        trace = served.trace
        if trace.path == common_pb2.PREFILL_PATH_REMOTE and trace.prefill_instance:
            self._observe_remote(served, trace)
        elif trace.path == common_pb2.PREFILL_PATH_LOCAL:
            if trace.recomputed_tokens and trace.ttft_us:
                cached = trace.prompt_tokens - trace.recomputed_tokens
                amount = self.work.of(float(cached), trace.prompt_tokens)
                self.local.add(served.decode, amount, max(0, trace.ttft_us - trace.queue_us) / 1000)
        elif trace.path == common_pb2.PREFILL_PATH_STORE and trace.kv_bytes and trace.transfer_us:
            self.store.add(served.decode, trace.kv_bytes, trace.transfer_us / 1000)
        if served.tokens >= _MIN_OUTPUT and served.decode_s > 0:
            self.decode.add(served.decode, served.running, 1000 * served.decode_s / (served.tokens - 1))
        if served.tokens:
            self.output.add(0.0, served.tokens, self.now())

    def _observe_remote(self, served: ServedRequest, trace: common_pb2.RequestTrace) -> None:
        if trace.kv_bytes:
            pair = (trace.prefill_instance, served.decode)
            self.transfer.add(pair, trace.kv_bytes, trace.exposed_us / 1000)
        if trace.prefill_instance != served.prefill or not trace.ttft_us or trace.failed_prefills:
            return  # another instance computed it: the work ahead of it there is unknown
        cached = float(max(trace.prefill_cached_tokens, trace.cached_tokens))
        computed = self.work.of(cached, trace.prompt_tokens)
        ms = (trace.ttft_us - trace.queue_us - trace.exposed_us) / 1000
        if computed > 0 and ms > 0:
            # How much of the work ahead had been computed by then is unknown, so the error grows with it.
            amount = computed + served.ahead
            if not served.ahead:
                self.work.add(cached, trace.prompt_tokens, ms)
            self.prefill.add(served.prefill, amount, ms, max(_LEAST_WEIGHT, (computed / amount) ** 2))
