"""The router's stream to an instance over a wire whose answers a test writes."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from baton.rpc.multiplex import Call, CallStream
from baton_router.dispatch.event_loop import END, TAKE, TurnBatcher


class Wire:
    """A channel whose stream brings what a test puts into it, and takes what is sent to nowhere."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.read = self.answers.get

    def stream_stream(self, method: str, **options: Any) -> Any:
        return lambda: self

    async def write(self, message: bytes) -> None:
        """It is lost."""

    def cancel(self) -> None:
        """There is nothing to cancel."""


def open_call_stream() -> tuple[CallStream, Wire, TurnBatcher]:
    """Return a stream, its wire, and what ends the turns of its loop."""
    steps, wire = TurnBatcher(), Wire()
    channel: Any = wire
    take, end = (
        functools.partial(steps.later, TAKE, CallStream.flush),
        functools.partial(steps.later, END, Call.tell_end),
    )
    return CallStream(channel, "d0", take, end), wire, steps
