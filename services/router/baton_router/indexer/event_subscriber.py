"""One event stream, of an instance or of a KV store, from its beginning to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable
from typing import Protocol

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from baton.api.v1 import events_pb2
from baton.rpc.errors import readable
from baton.rpc.http2.message_stream import StreamEnded
from baton_router.indexer.event_applier import EventApplier, EventGapError
from baton_router.metrics.fast_metrics import Counter

log = logging.getLogger(__name__)

SILENT_BEATS = 1.5
"""Times between two heartbeats after which an event stream counts as cut, if nothing came."""
GATHER_BEATS = 0.95
"""Such times that news may wait for more to come: then they come in the place of heartbeats."""
_LOST_BEATS = 8
"""Such times before another stream is opened in its place."""


class IndexMetrics:
    """Counts what event streams bring, per instance or KV store.

    Args:
        registry: Takes the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.events = Counter("baton_router_index_events", "KV events applied", ["instance"], registry)
        self.gaps = Counter("baton_router_index_sequence_gaps", "Gaps in KV events", ["instance"], registry)
        self.unknown = Counter(
            "baton_router_index_unknown_tier_events", "KV events of tiers not known here", ["instance"], registry
        )

    def remove(self, instance: str) -> None:
        """Remove the series of an instance that left."""
        for counter in (self.events, self.gaps, self.unknown):
            counter.remove(instance)


class _Answer(Protocol):
    @property
    def batch(self) -> events_pb2.KvEventBatch: ...


class EventStream(AsyncIterable[_Answer], Protocol):
    """A call that streams events."""

    def cancel(self) -> object: ...


class EventSubscriber:
    """Reads streams of events into an instance's part of the index.

    Args:
        events: The instance's part of the index.
        metrics: Where events and gaps are counted.
        beat_s: Seconds between the heartbeats that are asked for; 0: none are.
    """

    def __init__(self, events: EventApplier, metrics: IndexMetrics, beat_s: float) -> None:
        self._events = events
        self._metrics = metrics
        self._beat_s = beat_s
        self.heard = False
        """Whether the latest stream brought anything."""
        self._told: set[str] = set()
        """Unknown tiers that the log has."""

    async def follow(self, name: str, call: EventStream) -> bool:
        """Follow one stream until it ends; ``False``: there is none to be had.

        Args:
            name: Whose, for log and metrics.
            call: The stream, from :meth:`EventApplier.resume_from` on.
        """
        self.heard = False
        try:
            async with asyncio.timeout(None) as silence:
                async for answer in call:
                    self._take(name, readable(answer).batch, silence)
                    self.heard = True
        except TimeoutError:
            log.warning("KV events of %s fell silent", name)
        except EventGapError as error:
            log.warning("KV events of %s have a gap: %s", name, error)
            self._metrics.gaps.labels(name).inc()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return False
            log.warning("KV events of %s broke: %s: %s", name, error.code().name, error.details())
        except StreamEnded as end:
            if end.code is grpc.StatusCode.UNIMPLEMENTED:
                return False
            log.warning("KV events of %s broke: %s: %s", name, end.code.name, end.message)
        finally:
            call.cancel()
            self._events.broken()
        return True

    def _take(self, name: str, batch: events_pb2.KvEventBatch, silence: asyncio.Timeout) -> None:
        """Put a batch into the index. Once heartbeats come, ``silence`` ends a stream that nothing comes from."""
        if batch.heartbeat:
            self._events.heartbeat(batch, SILENT_BEATS * self._beat_s)
        else:
            before = self._events.num_events
            unknown = self._events.num_unknown
            if self._events.apply(batch):
                self._metrics.events.labels(name).inc(self._events.num_events - before)
            if self._events.num_unknown > unknown:
                self._metrics.unknown.labels(name).inc(self._events.num_unknown - unknown)
                self._tell_unknown(name)
        end = silence.when()
        if batch.heartbeat or end is not None:
            later = asyncio.get_running_loop().time() + _LOST_BEATS * self._beat_s
            if end is None or later - end > self._beat_s:  # a new timer costs more than a beat is worth
                silence.reschedule(later)

    def _tell_unknown(self, name: str) -> None:
        """Say once of each unknown tier that its blocks count nowhere."""
        new = self._events.unknown_tiers - self._told
        if new:
            self._told |= new
            log.warning(
                "KV events of %s are of tiers that this router does not know, their blocks count nowhere: %s",
                name,
                ", ".join(sorted(new)),
            )
