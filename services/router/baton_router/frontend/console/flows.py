"""Who sent KV to whom in the last seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.api.v1 import common_pb2
from baton.rpc.convert import path_from_pb

_MAX_FLOWS = 4096


_Way = tuple[common_pb2.PrefillPath.ValueType, str, str, str]
"""A flow as a trace has it, cheap to count; it becomes a :class:`Flow` when the console asks."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A way that prompts took.

    Attributes:
        path: ``local``, ``remote`` or ``store``.
        source: The prefill instance; empty unless ``path`` is ``remote``.
        target: The decode instance.
        pipe: Kind of pipe; empty: no KV travelled.
    """

    path: str
    source: str
    target: str
    pipe: str


class Flows:
    """Requests and bytes per flow, second by second, for the last ``window_s`` seconds.

    Args:
        window_s: How far back to remember.
        now: Monotonic clock, in seconds.
    """

    def __init__(self, window_s: int = 10, *, now: Callable[[], float] = time.monotonic) -> None:
        self.window_s = window_s
        self._now = now
        self._seconds: deque[tuple[int, dict[_Way, list[int]]]] = deque(maxlen=window_s + 1)

    def add(self, trace: common_pb2.RequestTrace, num_bytes: int) -> None:
        """Count a request's way and the bytes that it moved."""
        path = trace.path
        if not path:
            return
        second = int(self._now())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, {}))
        flows = self._seconds[-1][1]
        way = (path, trace.prefill_instance, trace.decode_instance, trace.pipe)
        counts = flows.get(way)
        if counts is None:
            if len(flows) >= _MAX_FLOWS:
                return
            counts = flows[way] = [0, 0]
        counts[0] += 1
        counts[1] += num_bytes

    def recent(self) -> dict[Flow, tuple[int, int]]:
        """Return requests and bytes of each flow of the window."""
        begin = self._now() - self.window_s
        totals: dict[Flow, list[int]] = {}
        for second, flows in self._seconds:
            if second < begin:
                continue
            for (wire, source, target, pipe), counts in flows.items():
                path = path_from_pb(wire) or ""
                total = totals.setdefault(Flow(path, source if path == "remote" else "", target, pipe), [0, 0])
                total[0] += counts[0]
                total[1] += counts[1]
        return {flow: (requests, num_bytes) for flow, (requests, num_bytes) in totals.items()}
