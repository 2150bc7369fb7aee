"""What a prefill instance tells those who wait for it: how long their prompts still take, and that it gets on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from baton.api.v1 import worker_pb2
from baton.errors import UnavailableError
from baton.types import RequestId
from baton.worker.engine_thread import EngineThread

INTERVAL_S = 1.0
_NEW = 0.5
"""Weight of the latest speed against those before it."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """The queue at a moment.

    Attributes:
        ahead: Per request, tokens to compute until its prompt is, and whether it waits no more.
        tokens_per_s: How fast prompts are computed.
    """

    ahead: dict[RequestId, tuple[int, bool]]
    tokens_per_s: float

    def of(self, request_id: RequestId) -> worker_pb2.PrefillResponse | None:
        """Return what to tell who waits for a request; ``None``: its prompt is computed."""
        found = self.ahead.get(request_id)
        if found is None:
            return None
        queue = worker_pb2.PrefillQueue(tokens_ahead=found[0], tokens_per_s=self.tokens_per_s, running=found[1])
        return worker_pb2.PrefillResponse(queue=queue)


class PrefillQueue:
    """Looks at the engine's queue as long as somebody waits. An engine that computes nothing is not told of.

    Args:
        engine: Whose.
        interval_s: Seconds between two looks.
    """

    def __init__(self, engine: EngineThread, interval_s: float = INTERVAL_S) -> None:
        self._engine, self._interval_s = engine, interval_s
        self._followers = 0
        self._next: asyncio.Future[QueueState] | None = None
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Have :meth:`next` come."""
        self._followers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="prefill queue")
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers:
                self._task.cancel()
                self._task = None

    def next(self) -> asyncio.Future[QueueState]:
        """Return the next look that shows an engine which gets on; shared, so do not cancel it."""
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    async def _run(self) -> None:
        core, speed = self._engine.core, 0.0
        with contextlib.suppress(UnavailableError):  # the engine has stopped: its requests end
            computed, at = await self._engine.call(lambda: (core.num_prefilled, time.monotonic()))
            while True:
                await asyncio.sleep(self._interval_s)
                # In the engine's thread: one that hangs in a step is not heard of.
                ahead, now_computed, now = await self._engine.call(
                    lambda: (core.prompt_queue(), core.num_prefilled, time.monotonic())
                )
                if now_computed == computed:
                    continue
                latest = (now_computed - computed) / (now - at)
                speed = latest if not speed else (1 - _NEW) * speed + _NEW * latest
                computed, at = now_computed, now
                if self._next is not None and not self._next.done():
                    self._next.set_result(QueueState(ahead, speed))
