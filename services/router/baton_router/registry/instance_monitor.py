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
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.api.v1 import worker_pb2
from baton.background import keep_running
from baton.config.router import RouterConfig
from baton.errors import BatonError
from baton.rpc.channel import Backoff
from baton.rpc.errors import call_unary, from_rpc_error
from baton.rpc.http2.message_stream import ServerStream, StreamEnded
from baton.types import Epoch, Role
from baton_router.indexer.events import GATHER_BEATS, EventSubscriber, IndexMetrics
from baton_router.metrics import Counter, GaugeFunction
from baton_router.registry.instance import CallState, Instance, InstanceInfo, Status
from baton_router.registry.load import NO_LIMIT, Waiters
from baton_router.registry.lost_instances import LostInstances

log = logging.getLogger(__name__)

Admit = Callable[[Instance, InstanceInfo], None]
"""Checks an instance's identity; raises a BatonError that names what does not fit."""


_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
_SILENT_S = 1.0
"""Seconds without an answer to a probe after which an instance is silent; live ones answer in milliseconds."""


_NAME = "baton_router_"


class RegistryMetrics(Collector):
    """Counts events of instances; their current values are read at each scrape, so removed instances have no series.

    Args:
        registry: Registry to add the metrics to.
        instances: Returns the known instances.
        lost: Instances that were lost lately.
        waiters: Requests that wait for one.

    Attributes:
        index: Metrics of the instances' event streams.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        instances: Callable[[], Iterable[Instance]],
        lost: LostInstances,
        waiters: Waiters,
    ) -> None:
        self._instances = instances
        self._lost_instances = lost
        self.index = IndexMetrics(registry)
        self.registrations = Counter(_NAME + "registrations", "Changes of registrations", ["change"], registry)
        self.changes = Counter(_NAME + "instance_changes", "Changes of instances' state", ["role", "status"], registry)
        self.lost = Counter(
            _NAME + "instances_lost", "Instances that went away without draining or deregistering", ["role"], registry
        )
        for role in Role:
            self.lost.labels(role.value)  # an increase from nothing would be none
        self.refusals = Counter(
            _NAME + "instance_refusals", "Instances refused, by the field that does not fit", ["field"], registry
        )
        self.redis_refused = Counter(
            _NAME + "redis_refused", "What stood in Redis and was not signed with the token", ["kind"], registry
        )
        self.discovery_failures = Counter(
            _NAME + "discovery_failures", "Failed tries to learn who is there", ["source"], registry
        )
        GaugeFunction(_NAME + "waiting_for_room", "Requests that wait for an instance", registry, lambda: len(waiters))
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield one family per value, one sample per instance."""
        labels = ["instance", "role"]
        gauges: tuple[tuple[str, str, Callable[[Instance], float]], ...] = (
            (
                "instance_healthy",
                "1: connected, answers, and is what it should be; 0 also for lost instances",
                lambda x: x.status is Status.READY and not x.silent,
            ),
            ("instance_draining", "1: takes no new requests", lambda x: x.load.draining),
            ("instance_in_flight", "Sequences this router has placed there", lambda x: x.load.requests),
            ("instance_work_tokens", "Work in flight as the policy counts it, in tokens", lambda x: x.load.work),
            ("index_blocks", "Blocks in the index", lambda x: x.events.num_blocks),
            (
                "index_age_seconds",
                "Time since the event stream broke or fell silent; 0: whole",
                lambda x: x.events.age_s,
            ),
            (
                "index_decided_prompts",
                "Prompts that stand in for events where there are none",
                lambda x: x.events.num_decided,
            ),
        )
        instances = list({x.instance_id: x for x in self._instances()}.values())
        for name, text, read in gauges:
            family = GaugeMetricFamily(_NAME + name, text, labels=labels)
            for x in instances:
                family.add_metric([x.instance_id, x.role.value], float(read(x)))
            if name == "instance_healthy":
                for lost in self._lost_instances.recent():
                    family.add_metric([lost.instance_id, lost.role.value], 0.0)
            yield family
        state = GaugeMetricFamily(
            _NAME + "index_state", "1 for the state that holds: exact, stale or off", labels=[*labels, "state"]
        )
        for x in instances:
            state.add_metric([x.instance_id, x.role.value, x.events.state.value], 1.0)
        yield state
        limit = GaugeMetricFamily(
            _NAME + "instance_limit", "Sequences that this router may have in flight there", labels=["instance"]
        )
        shared = GaugeMetricFamily(
            _NAME + "instance_shared_in_flight", "Sequences that other routers have there", labels=["instance"]
        )
        for x in instances:
            if x.load.limit < NO_LIMIT:
                limit.add_metric([x.instance_id], x.load.limit)
            shared.add_metric([x.instance_id], x.load.shared_requests)
        yield limit
        yield shared


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
        instance.drained = False
        instance.generation += 1
        events = keep_running(partial(self._follow_events, info.epoch), "events", detail=instance.address)
        watchers = [
            asyncio.create_task(self._follow_load(info, backoff), name=f"load {instance.address}"),
            asyncio.create_task(self._probe(info.epoch, self._config.probe_failures), name=f"probe {instance.address}"),
        ]
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            if instance.status is Status.READY and not instance.leaving:
                self._metrics.lost.labels(instance.role.value).inc()
            self._set(Status.DOWN, "; ".join(_reason(None if task.cancelled() else task.exception()) for task in done))
        finally:
            instance.admitted = instance.silent = False
            for task in (events, *watchers):
                task.cancel()
            await asyncio.gather(events, *watchers, return_exceptions=True)
            instance.drained = instance.load.draining
            instance.load.forget_reports()
            instance.report_calls(instance.open_tickets, CallState.LOST)

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
        answer = await call_unary(
            self._instance.stub.GetInfo,
            worker_pb2.GetInfoRequest(),
            timeout=self._config.probe_timeout_s,
            wait_for_ready=wait_for_ready,
        )
        return InstanceInfo.from_pb(answer)

    async def _follow_load(self, info: InstanceInfo, backoff: Backoff) -> None:
        request = worker_pb2.StreamLoadRequest(interval_ms=self._config.load_interval_ms)
        load = self._instance.load
        method = f"/{_SERVICE}/StreamLoad"
        stream = ServerStream(self._instance.dialer, method, request, worker_pb2.StreamLoadResponse)
        try:
            async for answer in stream:
                before = load.draining
                unreadable = load.unreadable
                load.observe(answer.load, info.fingerprint.block_size)
                self._instance.report_calls(answer.begun_tickets, CallState.BEGUN)
                self._instance.report_calls(answer.ended_tickets, CallState.ENDED)
                if self._instance.status is not Status.READY:
                    backoff.reset()
                    self._set(Status.READY)
                elif load.draining != before:
                    log.info(
                        "instance %s is %s", info.instance_id, "draining" if load.draining else "taking requests again"
                    )
                    self._changed()
                elif load.unreadable != unreadable:
                    log.log(
                        logging.WARNING if load.unreadable else logging.INFO,
                        "instance %s cannot read KV of: %s",
                        info.instance_id,
                        ", ".join(sorted(load.unreadable)) or "none, it can again",
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
