"""A drafter that may hang: it works in a thread of its own, and nobody waits for it for long.

Drafters that compute something bounded in the engine's process need none of this. One that waits for others (further
ranks of a draft model), or that another package brought, may come back late or never: then its call is given up, and
it is asked again when it has come back.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from baton.engine.sequence import Sequence
from baton.engine.speculation.drafter import Drafter, DrafterHangsError, Proposal

log = logging.getLogger(__name__)

WAIT_S = 0.5
"""A step waits no longer for drafts; a first call, which may have to warm up, is given up like any other."""
MAX_ENDED = 4096
"""Sequences that a drafter is still to be told of as ended; beyond, it hangs, and the oldest are forgotten."""
TELL_AT = 64
"""Ended sequences after which it is told of them, though nothing is proposed."""


@dataclass(slots=True)
class _Call:
    """Something to be done in the drafter's thread.

    Attributes:
        work: What.
        found: What came of it.
        error: What it raised.
        done: Set at its end.
    """

    work: Callable[[], list[Proposal]]
    found: list[Proposal] = field(default_factory=list)
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)


class BoundedDrafter:
    """A :class:`~baton.engine.speculation.drafter.Drafter` that asks another one, and waits a bounded time.

    Args:
        drafter: May hang, in any of its calls.
        wait_s: How long a step waits for it, in seconds.
    """

    def __init__(self, drafter: Drafter, wait_s: float = WAIT_S) -> None:
        self.name, self.sequential = drafter.name, drafter.sequential
        self._drafter, self._wait_s = drafter, wait_s
        self._ended: deque[Sequence] = deque(maxlen=MAX_ENDED)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._last: _Call | None = None
        # A daemon: a thread that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(torch.get_num_threads(),), name=f"drafter {self.name}", daemon=True
        )
        self._thread.start()

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Proposal]:
        """Return draft tokens; see the protocol.

        Raises:
            DrafterHangsError: They did not come in time, or an earlier call has not come back yet.
            Exception: What the drafter raised.
        """
        if self._hangs:
            raise DrafterHangsError(f"drafter {self.name} has not come back yet")
        call = self._begin(lambda: self._drafter.propose(wanted))
        if not call.done.wait(self._wait_s):
            raise DrafterHangsError(f"drafter {self.name} took more than {self._wait_s:g} s")
        if call.error is not None:
            raise call.error
        return call.found

    def ended(self, sequence: Sequence) -> None:
        """Take note that a sequence has ended: the drafter is told with its next call."""
        self._ended.append(sequence)
        if len(self._ended) >= TELL_AT and not self._hangs:
            self._begin(list)

    def close(self) -> None:
        """Give back what it holds, as far as it lets itself be closed; harmless if repeated."""
        self._calls.put(None)
        self._thread.join(self._wait_s)
        if self._thread.is_alive():
            log.warning("drafter %s hangs: it is closed amid its work", self.name)
        self._drafter.close()

    @property
    def _hangs(self) -> bool:
        return self._last is not None and not self._last.done.is_set()

    def _begin(self, work: Callable[[], list[Proposal]]) -> _Call:
        ended, self._ended = list(self._ended), deque(maxlen=MAX_ENDED)

        def told() -> list[Proposal]:
            for sequence in ended:
                self._drafter.ended(sequence)
            return work()

        self._last = call = _Call(told)
        self._calls.put(call)
        return call

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # which is a thread's own setting
        while (call := self._calls.get()) is not None:
            try:
                call.found = call.work()
            except Exception as error:
                call.error = error
            call.done.set()
