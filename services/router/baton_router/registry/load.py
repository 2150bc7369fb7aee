"""The work in flight on an instance, as this router counts it, immediately and without waiting for a report.

The unit is one token of work, plus ``REQUEST_OVERHEAD_TOKENS`` for each sequence. On a prefill instance a request
counts its prompt tokens that neither it nor the decode instance holds, those with a long context more (``PromptWork``),
until the first token arrives; on a decode instance the tokens of all its sequences, prompt included, until it ends. An
output whose length is announced counts from the start.

Reports of the instance show what *others* (a second router, a client that calls workers directly) have placed there:
the part of a report beyond what this router had in flight at that moment is added. So this router's requests count
immediately, those of others with the delay of the report, and nothing counts twice.

In addition to work in flight, a policy sees work that was done lately. With work in flight alone, a prompt prefix that
all requests share would keep them on the instance that first computed it, as long as that one just keeps up, while the
others idle: nothing would make them compute the prefix too.

Requests that no instance can take now wait in :class:`Waiters`.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from baton.api.v1 import common_pb2
from baton.native import Layout, address_of, function
from baton.types import Role

REQUEST_OVERHEAD_TOKENS = 64
RECENT_S = 300.0
"""Work done this long ago counts 1/e as much as work done now."""
NO_LIMIT = 2**62
_RECENT_SHARE = 0.2
"""Weight of a token of work done just now relative to one in flight. In replays (docs/benchmarks.md) a higher weight
gave more hits and a better balance, but longer queues: at 1.0 a tenth more time to first token."""
layout_of = function("placement_layout", ctypes.c_int64, ctypes.c_char_p)
"""Returns offsets and sizes of the structures of ``native/placement.c``."""
LOAD_ROW = Layout(
    "load_row", layout_of, work="d", done="d", done_at="d", sequences="d", waiting="d", room="d", limit="d"
)  # fmt: skip
"""An instance's load: work in flight and counted work that was done (tokens), when that was (s), sequences in flight,
prompt tokens to compute, sequences that may still be placed, and the limit of these."""


class LoadTracker:
    """One instance's work in flight.

    Args:
        role: Role of the instance.
        limit: Maximum number of sequences that this router may have here.

    Attributes:
        requests: Sequences placed here by this router.
        tokens: Tokens of work of these sequences.
        prompts: Prompt tokens that a decode instance has yet to compute, of requests placed without prefill instance.
        foreign: Work placed here by others, in tokens, from the last report.
        shared: Work placed here by routers that share their load, in tokens, from ``shared_requests`` and
            ``shared_tokens``.
        freed: Called when a reservation is released.
        report: Last report of the instance.
        draining: Whether the instance reported that it accepts no new requests.
        unreadable: Addresses of prefill instances whose KV the instance cannot read now, from its last report.
        prompts_reported: Prompt tokens that it has yet to compute, from its last report.
        ended: Sequences of this router that have ended since that report.
        now: Monotonic clock, in seconds.
    """

    __slots__ = (
        "_at",
        "_done",
        "_done_at",
        "_limit",
        "_watcher",
        "draining",
        "ended",
        "foreign",
        "freed",
        "now",
        "prompts",
        "prompts_reported",
        "report",
        "requests",
        "role",
        "shared",
        "shared_requests",
        "shared_tokens",
        "tokens",
        "unreadable",
    )

    def __init__(self, role: Role, *, limit: int = NO_LIMIT) -> None:
        self.role = role
        self._limit = limit
        self.requests = self.tokens = self.prompts = 0
        self.shared_requests = self.shared_tokens = 0
        self.foreign = self.shared = 0.0
        self.freed: Callable[[], None] | None = None
        self.report = common_pb2.LoadReport()
        self.draining = False
        self.unreadable: frozenset[str] = frozenset()
        self.prompts_reported = self.ended = 0
        self.now: Callable[[], float] = time.monotonic
        self._done = self._done_at = 0.0
        self._watcher: LoadColumns | None = None
        self._at = 0

    @property
    def limit(self) -> int:
        """Maximum number of sequences that this router may have here."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        self.changed()

    @property
    def work(self) -> float:
        """Work in flight, in tokens."""
        return self.tokens + REQUEST_OVERHEAD_TOKENS * self.requests + self.foreign + self.shared

    @property
    def load(self) -> float:
        """Work in flight, and a share of what was done lately, in tokens."""
        return self.work + _RECENT_SHARE * self._done * math.exp((self._done_at - self.now()) / RECENT_S)

    def has_room(self, sequences: int) -> bool:
        """Whether a request may be placed here now.

        A request with more sequences than the limit is admitted while there is room for any: else it never would be.
        """
        return self.requests + sequences <= self.limit or (sequences > self.limit and self.requests < self.limit)

    def changed(self) -> None:
        """Mark this tracker as changed in the columns that it is part of."""
        if self._watcher is not None:
            self._watcher.changed.add(self._at)

    def add_done(self, tokens: float) -> None:
        """Count work that is no longer in flight, in tokens."""
        now = self.now()
        self._done = self._done * math.exp((self._done_at - now) / RECENT_S) + tokens
        self._done_at = now
        self.changed()

    @property
    def prompts_waiting(self) -> int:
        """Prompt tokens that it has yet to compute: this router's immediately, others' from the report."""
        return max(self.prompts, self.prompts_reported)

    def observe(self, report: common_pb2.LoadReport, block_size: int) -> None:
        """Apply a report of the instance."""
        self.report = report
        self.ended = 0
        self.draining = report.draining
        if self.unreadable or report.unreadable_prefills:
            self.unreadable = frozenset(report.unreadable_prefills)
        self.prompts_reported = report.waiting_prompt_tokens
        if self.role is Role.PREFILL:
            tokens = float(report.waiting_prompt_tokens)
        else:
            tokens = float(report.blocks_active * block_size)
        requests = report.num_running + report.num_waiting + report.num_loading
        more_requests = max(0, requests - self.requests - self.shared_requests)
        # Without requests of others, further blocks in use are rounding or requests that just ended.
        more_tokens = max(0.0, tokens - self.tokens - self.shared_tokens) if more_requests else 0.0
        self.foreign = more_tokens + REQUEST_OVERHEAD_TOKENS * more_requests
        self.changed()

    def share(self, requests: int, tokens: int) -> None:
        """Set what other routers have in flight here; ``foreign`` is corrected with the next report."""
        self.shared_requests = requests
        self.shared_tokens = tokens
        self.shared = float(tokens + REQUEST_OVERHEAD_TOKENS * requests)
        self.changed()

    def forget_reports(self) -> None:
        """Forget all reports: their process is gone."""
        self.report = common_pb2.LoadReport()
        self.foreign = 0.0
        self.draining = False
        self.unreadable = frozenset()
        self.prompts_reported = 0
        self._done = 0.0
        self.changed()


class LoadColumns:
    """The loads of many instances as rows; only trackers that changed are read again.

    Attributes:
        trackers: Trackers of the rows, in order.
        changed: Positions of trackers that changed since they were read.
        over: Whether one of the trackers belongs to later columns, so that these are outdated.
        address: Memory address of the rows, ``LOAD_ROW``.
    """

    def __init__(self, trackers: Sequence[LoadTracker]) -> None:
        self.trackers = trackers
        self.changed = set(range(len(trackers)))
        self.over = False
        self._rows = np.zeros(len(trackers), LOAD_ROW.dtype)
        self._memory = self._rows.view(np.uint8).data
        self.address = address_of(self._rows)
        for at, tracker in enumerate(trackers):
            if tracker._watcher is not None:
                tracker._watcher.over = True
            tracker._watcher = self
            tracker._at = at

    def read(self) -> None:
        """Update the rows of changed trackers."""
        while self.changed:
            at = self.changed.pop()
            x = self.trackers[at]
            LOAD_ROW.pack_into(
                self._memory,
                at * LOAD_ROW.size,
                x.work,
                _RECENT_SHARE * x._done,
                x._done_at,
                x.requests,
                x.prompts_waiting,
                x._limit - x.requests,
                x._limit,
            )


@dataclass(slots=True)
class LoadReservation:
    """A share of one instance's load; ``release`` may be called any number of times.

    Attributes:
        tracker: Load of the instance.
        tokens: Tokens of work.
        requests: Number of sequences.
        prompt: Prompt tokens that a decode instance is to compute itself, until :meth:`prefilled`.
        expected: Tokens of output that count before they are generated.
        released: Whether it was released.
    """

    tracker: LoadTracker
    tokens: int
    requests: int = 1
    prompt: int = 0
    expected: int = 0
    released: bool = False

    def __post_init__(self) -> None:
        self.tracker.tokens += self.tokens + self.expected
        self.tracker.requests += self.requests
        self.tracker.prompts += self.prompt
        self.tracker.changed()

    def prefilled(self) -> None:
        if self.prompt:
            self.tracker.prompts -= self.prompt
            self.prompt = 0
            self.tracker.changed()

    def grow(self, tokens: int) -> None:
        """Add generated tokens."""
        if not self.released:
            counted = min(tokens, self.expected)
            self.expected -= counted
            self.tokens += tokens
            self.tracker.tokens += tokens - counted
            self.tracker.changed()

    def release(self) -> None:
        if not self.released:
            self.released = True
            self.prefilled()
            self.tracker.tokens -= self.tokens + self.expected
            self.tracker.requests -= self.requests
            self.tracker.ended += self.requests
            self.tracker.add_done(self.tokens + REQUEST_OVERHEAD_TOKENS * self.requests)
            if self.tracker.freed is not None:
                self.tracker.freed()


class Waiters:
    """A queue of waiting requests; used in one event loop.

    A woken request must check again whether there is room; if there is none it waits again, behind the others.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, timeout_s: float) -> None:
        """Wait to be woken, at most ``timeout_s`` seconds."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except TimeoutError:
            return
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.wake()  # this turn is not used: wake another one
            raise
        finally:
            # A simultaneous wake may have removed it already.
            if (not turn.done() or turn.cancelled()) and turn in self._waiting:
                self._waiting.remove(turn)

    def wake(self, count: int = 1) -> None:
        """Wake the ``count`` requests that have waited longest."""
        while count > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                count -= 1

    def wake_all(self) -> None:
        """Wake all: some instance became more or less usable."""
        self.wake(len(self._waiting))
