"""The router's connection to one instance: its identity, load, cached blocks and liveness.

One task per instance. A session begins with ``GetInfo`` (role and fingerprint must fit) and lasts as long as the load
stream and the probes do; when it ends the instance is down at once, and the next attempt follows after a jittered
pause. The event stream is part of the session, but may break alone: then only the index is stale.

The death of a process breaks its connections, which is noticed immediately. One that hangs answers no probe: after a
few missed ones its running requests are broken off, so that they can go on elsewhere. The same holds for an instance
that left or whose lease ran out, as long as requests run there.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import grpc
import grpc.aio

from baton.api.v1 import worker_pb2
from baton.config.router import RouterConfig
from baton.errors import BatonError
from baton.rpc.channel import Backoff
from baton.rpc.errors import from_rpc_error, readable
from baton.rpc.http2.message_stream import ServerStream, StreamEnded
from baton.types import Epoch
from baton_router.indexer.events import GATHER_BEATS, EventSubscriber
from baton_router.registry.instance import Instance, InstanceInfo, Status
from baton_router.registry.metrics import RegistryMetrics

log = logging.getLogger(__name__)

Admit = Callable[[Instance, InstanceInfo], None]
"""Checks an instance's identity; raises a BatonError that names what does not fit."""


_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
_SILENT_S = 1.0
"""Seconds without an answer to a probe after which an instance is silent; live ones answer in milliseconds."""


class ConnectionLostError(Exception):
    """A session ended; the message says why."""


class InstanceMonitor:
    """Keeps one :class:`Instance` up to date.

    Args:
        instance: The instance.
        config: Intervals and limits.
        metrics: Metrics of changes, events and gaps.
        admit: Checks the identity of the process that answers.
        changed: Called whenever the instance became more or less usable.
    """

    def __init__(
        self,
        instance: Instance,
        config: RouterConfig,
        metrics: RegistryMetrics,
        *,
        admit: Admit,
        changed: Callable[[], None],
    ) -> None:
        self._instance = instance
        self._config = config
        self._metrics = metrics
        self._admit = admit
        self._changed = changed
        self._rng = random.Random()

    async def run(self) -> None:
        """Connect, and connect again, until cancelled."""
        backoff = Backoff(self._config.reconnect_max_s, self._rng)
        try:
            while True:
                try:
                    await self._session(backoff)
                except Exception:
                    log.exception("the monitor of %s failed", self._instance.address)
                    self._set(Status.DOWN, "internal error")
                await asyncio.sleep(backoff.next_s())
        finally:
            self._instance.events.broken()

    async def watch_last_requests(self, failures: int) -> None:
        """Probe an instance that gets no new requests, until cancelled; break off its requests if it hangs.

        Args:
            failures: Number of missed probes after which it counts as hanging.
        """
        info = self._instance.info
        if info is None:
            return
        try:
            await self._probe(info.epoch, failures)
        except (grpc.RpcError, ConnectionLostError) as error:
            log.warning("instance %s, which left, is lost: %s", info.instance_id, _reason(error))

    async def _session(self, backoff: Backoff) -> None:
        instance = self._instance
        try:
            info = await self._get_info(wait_for_ready=True)
            self._admit(instance, info)
        except BatonError as error:
            self._refuse(error)
            return
        except (grpc.RpcError, ConnectionLostError) as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED:
                self._refuse(from_rpc_error(error))
                return
            self._set(Status.DOWN, _reason(error))
            return
        if instance.events.restarted(info.epoch, info.num_blocks):
            log.info("instance %s restarted", info.instance_id)
        instance.info = info
        instance.admitted = True
        instance.generation += 1
        events = asyncio.create_task(self._follow_events(info.epoch), name=f"events {instance.address}")
        watchers = [
            asyncio.create_task(self._follow_load(info, backoff), name=f"load {instance.address}"),
            asyncio.create_task(self._probe(info.epoch, self._config.probe_failures), name=f"probe {instance.address}"),
        ]
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            self._set(Status.DOWN, "; ".join(_reason(task.exception()) for task in done))
        finally:
            instance.admitted = instance.silent = False
            for task in (events, *watchers):
                task.cancel()
            await asyncio.gather(events, *watchers, return_exceptions=True)
            instance.load.forget_reports()

    def _refuse(self, error: BatonError) -> None:
        if self._instance.status is not Status.REFUSED:
            self._metrics.refusals.labels(error.field or "").inc()
        self._set(Status.REFUSED, error.message)

    def _set(self, status: Status, reason: str = "") -> None:
        instance = self._instance
        if (instance.status, instance.reason) != (status, reason):
            level = logging.INFO if status is Status.READY else logging.WARNING
            log.log(
                level, "%s instance %s is %s%s", instance.role, instance.instance_id, status, reason and f": {reason}"
            )
            instance.status = status
            instance.reason = reason
            self._metrics.changes.labels(instance.role, status).inc()
            self._changed()

    async def _get_info(self, *, wait_for_ready: bool) -> InstanceInfo:
        answer = await self._instance.stub.GetInfo(
            worker_pb2.GetInfoRequest(), timeout=self._config.probe_timeout_s, wait_for_ready=wait_for_ready
        )
        return InstanceInfo.from_pb(readable(answer))

    async def _follow_load(self, info: InstanceInfo, backoff: Backoff) -> None:
        request = worker_pb2.StreamLoadRequest(interval_ms=self._config.load_interval_ms)
        load = self._instance.load
        method = f"/{_SERVICE}/StreamLoad"
        stream = ServerStream(self._instance.dialer, method, request, worker_pb2.StreamLoadResponse)
        try:
            async for answer in stream:
                before = load.draining
                load.observe(answer.load, info.fingerprint.block_size)
                if self._instance.status is not Status.READY:
                    backoff.reset()
                    self._set(Status.READY)
                elif load.draining != before:
                    log.info(
                        "instance %s is %s", info.instance_id, "draining" if load.draining else "taking requests again"
                    )
                    self._changed()
        finally:
            stream.cancel()
        raise ConnectionLostError("it closed the load stream")

    async def _probe(self, epoch: Epoch, failures: int) -> None:
        """Ask an instance for its identity unless events or their heartbeats have arrived since the last probe."""
        missed = 0
        heard = self._instance.events.num_heard
        while True:
            await asyncio.sleep(self._config.probe_interval_s)
            if heard != self._instance.events.num_heard:
                missed = 0
                heard = self._instance.events.num_heard
                self._set_heard(True)
                continue
            slow = asyncio.get_running_loop().call_later(_SILENT_S, self._set_heard, False)
            try:
                info = await self._get_info(wait_for_ready=False)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
                self._set_heard(False)
                missed += 1
                if missed >= failures:
                    self._instance.lose()
                    raise ConnectionLostError(f"it missed {missed} probes") from error
                continue
            finally:
                slow.cancel()
            self._set_heard(True)
            missed = 0
            if info.epoch != epoch:
                raise ConnectionLostError("it restarted")

    def _set_heard(self, heard: bool) -> None:
        instance = self._instance
        if instance.silent == heard:
            instance.silent = not heard
            if instance.status is Status.READY:
                level = logging.INFO if heard else logging.WARNING
                log.log(level, "%s is %s", instance.instance_id, "heard again" if heard else "silent")
            self._changed()

    async def _follow_events(self, epoch: Epoch) -> None:
        """Keep the event stream open; returns only if the instance has no such stream."""
        if not self._config.kv_events:
            return
        backoff = Backoff(self._config.reconnect_max_s, self._rng)
        events = self._instance.events
        name = self._instance.instance_id
        beat_ms = self._config.index_heartbeat_ms
        follower = EventSubscriber(events, self._metrics.index, beat_ms / 1000)
        while True:
            request = worker_pb2.StreamKvEventsRequest(
                from_sequence=events.resume_from(epoch),
                epoch=epoch,
                heartbeat_ms=beat_ms,
                gather_ms=int(GATHER_BEATS * beat_ms),
                packed=True,
            )
            method = f"/{_SERVICE}/StreamKvEvents"
            stream = ServerStream(self._instance.dialer, method, request, worker_pb2.StreamKvEventsResponse)
            if not await follower.follow(name, stream):
                log.warning("instance %s has no KV events: the router goes by its own decisions there", name)
                return
            if follower.heard:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())


def _reason(error: BaseException | None) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    if isinstance(error, StreamEnded):
        return f"{error.code.name}: {error.message}"
    return (str(error) or type(error).__name__) if error is not None else "it ended"
