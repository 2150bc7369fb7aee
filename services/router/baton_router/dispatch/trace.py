"""One trace for a request that may have run on several instances."""

from __future__ import annotations

from baton.api.v1 import common_pb2

_SUMS = ("kv_bytes", "transfer_us", "exposed_us", "transferred_tokens", "recomputed_tokens", "num_preemptions")


class TraceMerge:
    """Collects the traces of all attempts.

    What describes the request (path, prompt and cached tokens, TTFT) comes from the first attempt that answered; costs
    are summed; ``decode_instance`` is the last one, ``pipe`` the first that was used.

    Args:
        router_queue_us: How long the request waited before the first attempt.
    """

    __slots__ = ("_latest", "_next", "_router_queue_us", "num_migrations")

    def __init__(self, router_queue_us: int = 0) -> None:
        self._router_queue_us = router_queue_us
        self._latest: dict[int, common_pb2.RequestTrace] = {}
        self._next = 0
        self.num_migrations = 0

    def attempt(self) -> int:
        """Return the key of a new attempt."""
        self._next += 1
        return self._next

    def update(self, attempt: int, trace: common_pb2.RequestTrace) -> None:
        """Take an attempt's trace; a later one replaces its earlier."""
        self._latest[attempt] = trace

    def attempts(self) -> list[common_pb2.RequestTrace]:
        """Return the latest trace of each attempt that answered, in order."""
        if len(self._latest) == 1:
            return list(self._latest.values())
        return [trace for _, trace in sorted(self._latest.items())]

    def merged(self) -> common_pb2.RequestTrace:
        """Return the request's trace as far as it is known."""
        if len(self._latest) == 1:
            (out,) = self._latest.values()
        else:
            out = self._sum()
        out.num_migrations = self.num_migrations
        out.router_queue_us = self._router_queue_us
        return out

    def _sum(self) -> common_pb2.RequestTrace:
        out = common_pb2.RequestTrace()
        for at, trace in enumerate(self.attempts()):
            if at == 0:
                out.CopyFrom(trace)
                continue
            for name in _SUMS:
                setattr(out, name, getattr(out, name) + getattr(trace, name))
            out.failed_prefills.extend(trace.failed_prefills)
            out.decode_instance = trace.decode_instance
            if not out.pipe and trace.pipe:
                # The KV bytes summed above came over it.
                out.pipe = trace.pipe
        return out
