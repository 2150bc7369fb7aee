"""The router's streams to decode instances: one per instance carries the calls of all requests that run there."""

from __future__ import annotations

import functools
from weakref import WeakKeyDictionary

from baton.rpc.multiplex import Call, CallStream, Reader
from baton_router.dispatch.turn_batching import END, TAKE, Steps
from baton_router.registry.instance import Instance


class WorkerStreams:
    """The streams of one router, opened when they are needed. Each ends with its instance's channel.

    Args:
        steps: Of this router's requests; ``None``: these streams have their own.
    """

    def __init__(self, steps: Steps | None = None) -> None:
        self.steps = steps or Steps()
        self._streams: WeakKeyDictionary[Instance, CallStream] = WeakKeyDictionary()
        self._deliver = functools.partial(self.steps.later, TAKE, Call.flush)
        self._deliver_end = functools.partial(self.steps.later, END, Call.tell_end)

    def start(self, instance: Instance, request: bytes, reader: Reader) -> Call:
        """Begin a call on an instance; see :meth:`CallStream.start`. A stream that broke is opened again."""
        stream = self._streams.get(instance)
        if stream is None or stream.broken:
            stream = self._streams[instance] = CallStream(
                instance.channel, instance.instance_id, self._deliver, self._deliver_end
            )
        return stream.start(request, reader)
