"""Methods of speculative decoding by name, and a wrapper for drafters that may hang."""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from baton.background import BackgroundThread
from baton.config import EngineConfig
from baton.config.worker import BUILT_IN_DRAFTERS
from baton.engine.executor.base import Executor
from baton.engine.sequence import Sequence
from baton.engine.speculation.chain import ChainDrafter
from baton.engine.speculation.drafter import Drafter, DrafterHangsError, Proposal, ReadsHidden
from baton.errors import ConfigError
from baton.plugins import PluginGroup

log = logging.getLogger(__name__)

WAIT_S = 0.5
"""A step waits no longer for drafts; a first call, which may have to warm up, is given up like any other."""
MAX_ENDED = 4096
"""Finished sequences not reported to the drafter yet; beyond, it hangs, and the oldest are dropped."""
TELL_AT = 64
"""Finished sequences after which they are reported even without a proposal."""


_Work = Callable[[], list[Proposal]]


class BoundedDrafter:
    """A :class:`~baton.engine.speculation.drafter.Drafter` that calls another one in its own thread, with a timeout.

    Drafters that compute something bounded in the engine's process need none of this. One that waits for others (ranks
    of a draft model), or that another package brought, may return late or never: its call is given up then, and it is
    asked again once it has returned.

    Args:
        drafter: May hang, in any of its calls.
        wait_s: How long a step waits for it, in seconds.
    """

    def __init__(self, drafter: Drafter, wait_s: float = WAIT_S) -> None:
        self.name = drafter.name
        self.sequential = drafter.sequential
        self._drafter = drafter
        self._wait_s = wait_s
        self._ended: deque[Sequence] = deque(maxlen=MAX_ENDED)
        self._calls: queue.SimpleQueue[tuple[Future[list[Proposal]], _Work] | None] = queue.SimpleQueue()
        self._last: Future[list[Proposal]] | None = None
        # A daemon: a thread that hangs must not keep the process from ending.
        self._thread = BackgroundThread("drafter", partial(self._run, torch.get_num_threads()), detail=self.name)
        self._thread.start()

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[Proposal]:
        """Return draft tokens; see the protocol.

        Raises:
            DrafterHangsError: They did not come in time, or an earlier call has not come back yet.
            Exception: What the drafter raised.
        """
        if self._hangs:
            raise DrafterHangsError(f"drafter {self.name} has not come back yet")
        call = self._submit(lambda: self._drafter.propose(wanted))
        if not futures.wait([call], self._wait_s).done:
            raise DrafterHangsError(f"drafter {self.name} took more than {self._wait_s:g} s")
        return call.result()

    def sequence_finished(self, sequence: Sequence) -> None:
        """Queue a finished sequence; the drafter gets it with its next call."""
        self._ended.append(sequence)
        if len(self._ended) >= TELL_AT and not self._hangs:
            self._submit(list)

    def close(self) -> None:
        """Close the drafter, if it does not hang; may be called again."""
        self._calls.put(None)
        self._thread.join(self._wait_s)
        if self._thread.is_alive():
            log.warning("drafter %s hangs: it is closed amid its work", self.name)
        self._drafter.close()

    @property
    def _hangs(self) -> bool:
        return self._last is not None and not self._last.done()

    def _submit(self, work: _Work) -> Future[list[Proposal]]:
        ended = list(self._ended)
        self._ended = deque(maxlen=MAX_ENDED)

        def run() -> list[Proposal]:
            for sequence in ended:
                self._drafter.sequence_finished(sequence)
            return work()

        self._last = call = Future[list[Proposal]]()
        self._calls.put((call, run))
        return call

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # which is a thread's own setting
        while (item := self._calls.get()) is not None:
            call, work = item
            try:
                call.set_result(work())
            except Exception as error:
                call.set_exception(error)


DRAFTERS = PluginGroup("speculative", "baton.drafters", BUILT_IN_DRAFTERS)
"""Callables that take the :class:`EngineConfig` and the executor and return a :class:`Drafter`."""


def load_drafter(config: EngineConfig, executor: Executor) -> Drafter | None:
    """Return the drafter for a loaded model; ``None``: no speculative decoding.

    Raises:
        ConfigError: There is no such method, or it cannot work with this model; names the field.
    """
    name = config.speculative
    if name == "none":
        return None
    make = DRAFTERS.load(name, other_names=["none"])
    if config.speculative_width > 1 and (why := executor.why_no_trees):
        raise ConfigError(f"speculative_width must be 1 here: {why}", field="speculative_width")
    made: Any = make(config, executor)
    if not hasattr(made, "sequence_finished"):  # a package that has the method under its earlier name
        made.sequence_finished = made.ended
    drafter: Drafter = made
    if isinstance(drafter, ChainDrafter):
        drafter.tells_draws = config.speculative_acceptance == "rejection"
    waits = name not in BUILT_IN_DRAFTERS or config.speculative_tp > 1
    return BoundedDrafter(drafter) if waits and not isinstance(drafter, ReadsHidden) else drafter
