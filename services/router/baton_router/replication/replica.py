"""One of several routers: publishes its placements, applies those of others, keeps its part of capacities.

No request ever waits for Redis. Placements read two numbers of the instance's load, which tasks here keep up to date:
the work that the other replicas have in flight there, and how much this one may have; and the index contains the blocks
that others' requests will make instances hold. When Redis is away the router goes on with its own counts and with the
instances' reports.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.background import keep_running
from baton.config.router import RouterConfig
from baton.rpc.channel import Backoff
from baton.rpc.redis import cancel_task, redis_errors
from baton.rpc.service_token import Token
from baton.types import Role
from baton_router.metrics import Counter, GaugeFunction
from baton_router.registry.registry import Registry
from baton_router.replication.capacity import LEASE_S, InstanceCapacity, Peer, Peers
from baton_router.replication.pending_sync import PendingPublisher, RemotePending
from baton_router.replication.redis_log import RedisLog
from baton_router.replication.wire import Entry, EntryError, ExpectedNews, Registered, Totals, decode, encode

log = logging.getLogger(__name__)

SILENT_S = 3.0
_FULL_S = 1.0
_TICK_S = 0.1
_IDLE = 3
"""Factor of the interval between two looks for news after one without any."""
_CALM_S = 30.0
"""Seconds without a refused entry after which the next one is logged again."""
_LATEST_S = 0.5
"""Longest pause between two attempts to reach Redis: shorter than the time in which Redis grants no new units."""


class SharedState(enum.StrEnum):
    """Connection of this replica to the others."""

    JOINING = "joining"
    SHARED = "shared"
    ALONE = "alone"
    """Redis is away."""


class Replica(Collector):
    """Ties a registry to the other routers' registries.

    Args:
        config: URL of Redis, and limits.
        registry: Registry whose loads and pending blocks are shared.
        capacity: This replica's shares of the instances' capacity, which are kept up to date here.
        metrics: Registry of the metrics.
        token: Shared token of the services, which signs entries of the stream.
        now: Monotonic clock, in seconds.

    Raises:
        ConfigError: Redis' URL cannot be read, or its client is not installed.
    """

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        capacity: InstanceCapacity,
        metrics: CollectorRegistry,
        *,
        token: Token | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._registry = registry
        self._capacity = capacity
        self._now = now
        entries = Counter("baton_router_replica_entries", "Entries of the stream of replicas", ["direction"], metrics)
        self._num_published = entries.labels("published")
        self._num_received = entries.labels("received")
        self._num_refused = entries.labels("refused")
        self._losses = Counter("baton_router_redis_losses", "Times that Redis went away", [], metrics)
        chains = Counter(
            "baton_router_replica_expectations_told", "Chains of blocks told to the other routers", [], metrics
        )
        self.name = capacity.name
        self._store = RedisLog(config.redis, config.redis_prefix, self.name, token, self._refuse)
        self._doubted_at = now()
        self._doubts = False
        self.peers = Peers(self.name, SILENT_S, now)
        self.publisher = PendingPublisher(registry, chains, now) if config.replica_expectations else None
        self.remote_pending = RemotePending(registry, now)
        self._epoch = secrets.token_hex(8)
        self._sequence = 0
        self._published: dict[str, Totals] = {}
        self._published_registered: tuple[Registered, ...] = ()
        self._full_at = self._reached_at = now()
        self.state = SharedState.JOINING
        self._tasks: list[asyncio.Task[None]] = []
        GaugeFunction(
            "baton_router_replicas",
            "Routers that share their load, this one included",
            metrics,
            lambda: 1 + len(self.peers.live()),
        )
        GaugeFunction(
            "baton_router_replica_expectations",
            "Chains of blocks that other routers' requests make instances compute",
            metrics,
            lambda: len(self.remote_pending),
        )
        metrics.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the state of the connection to the others."""
        state = GaugeMetricFamily(
            "baton_router_replica_state", "1 for the state that holds: joining, shared or alone", labels=["state"]
        )
        state.add_metric([self.state.value], 1.0)
        yield state

    def start(self) -> None:
        """Begin to join; needs a running loop."""
        self._tasks = [
            keep_running(self._stay_connected, "replicas"),
            keep_running(self._tick, "replicas tick"),
        ]

    async def close(self) -> None:
        """Release all units and announce the departure, if Redis is reachable."""
        await asyncio.gather(*(cancel_task(task) for task in self._tasks))
        self._forget_expectations()
        if self.state is SharedState.SHARED:
            try:
                await self._store.release_all(self._capacity.parts)
                await self._store.publish(encode(self._entry({}, left=True)))
            except redis_errors() as error:
                log.warning("could not tell the other routers that this one ends: %s", error)
        await self._store.close()

    def report(self) -> dict[str, Any]:
        """Return the state for ``/debug/replicas``."""
        now = self._now()
        return {
            "replica": self.name,
            "state": self.state.value,
            "redis_reached_s_ago": round(now - self._reached_at, 3),
            "units": {
                name: {
                    "capacity": part.capacity,
                    "held": part.held,
                    "limit": part.tracker.limit,
                    "in_flight": part.tracker.requests,
                }
                for name, part in self._capacity.parts.items()
            },
            "waiting": len(self._registry.waiters),
            "expectations_told": 0 if self.publisher is None else len(self.publisher),
            "others": [
                {
                    "replica": peer.name,
                    "heard_s_ago": round(now - peer.heard, 3),
                    "silent": peer.silent,
                    "in_flight": {name: t.requests for name, t in peer.totals.items() if t.requests},
                    "held": {name: t.held for name, t in peer.totals.items() if t.held},
                    "expectations": self.remote_pending.count(peer.name),
                    "registered": [x.address for x in peer.registered],
                }
                for peer in self.peers.all()
            ],
        }

    # --- connection ---

    async def _stay_connected(self) -> None:
        backoff = Backoff(_LATEST_S, random.Random())
        errors = redis_errors()
        while True:
            try:
                await self._store.connect()
                await self._join()
                if self.publisher is not None:
                    self.publisher.start()
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._read())
                    tasks.create_task(self._write(backoff))
            except* errors as group:
                if self.state is not SharedState.ALONE:
                    log.warning(
                        "Redis is away, this router goes by its own counts and the instances' reports: %s",
                        group.exceptions[0],
                    )
                    self._losses.inc()
                self.state = SharedState.ALONE
            self._forget_expectations()
            await self._store.disconnect()
            await asyncio.sleep(backoff.next_s())

    async def _join(self) -> None:
        """Bring a Redis that may be empty up to date: the others' units first, then this replica's."""
        for peer in self.peers.all():
            await self._store.remember(peer.name, [(name, t.held) for name, t in peer.totals.items() if t.held])
        self._published.clear()
        self._full_at = -1.0
        await self._write_once(rejoin=True)

    def _refuse(self, why: str) -> None:
        """Count an entry that is not signed or not recent; log the first of a series."""
        self._registry.refused_in_redis("replica")
        if not self._doubts:
            log.warning("entries of the stream of replicas in Redis are ignored: %s", why)
        self._doubts = True
        self._doubted_at = self._now()

    def _forget_expectations(self) -> None:
        """Count only this router's own pending chains: without Redis it does not learn when the others' are over."""
        self.remote_pending.clear()
        if self.publisher is not None:
            self.publisher.stop()

    async def _read(self) -> None:
        async for batch in self._store.read():
            changed = False
            for data in batch:
                try:
                    entry = decode(data)
                except EntryError as error:
                    self._num_refused.inc()
                    log.warning("an entry of the stream of replicas cannot be read: %s", error)
                    continue
                self._num_received.inc()
                if self.peers.apply(entry):
                    changed = True
                    if self.publisher is not None:
                        self.remote_pending.apply(entry)
                    if entry.full or entry.left:
                        self._apply_registrations()
            if changed:
                self._spread()

    async def _write(self, backoff: Backoff) -> None:
        interval_s = self._config.replica_interval_ms / 1000
        while True:
            news = await self._write_once()
            if self.state is not SharedState.SHARED:
                log.info("this router shares its load with others as %s", self.name)
                self.state = SharedState.SHARED
                backoff.reset()
            await asyncio.sleep(interval_s if news else _IDLE * interval_s)

    async def _write_once(self, *, rejoin: bool = False) -> bool:
        """Settle units and publish what is new; return whether anything was."""
        began = self._now()
        if rejoin:
            claims = self._capacity.holdings(sure=began - self._reached_at < self._config.replica_forget_s)
        else:
            claims = self._capacity.claims(self.peers, len(self._registry.waiters))
        full = self._now() >= self._full_at
        if claims or full:
            units = await self._store.claim(claims)
            for claim, granted in zip(claims, units, strict=True):
                self._capacity.granted(claim, granted)
            self._reached_at = began
        entry = self._news(full=full)
        if entry is not None:
            await self._store.publish(encode(entry))
            self._num_published.inc()
            self._reached_at = began
        return entry is not None

    # --- what is published ---

    def _news(self, *, full: bool) -> Entry | None:
        """Return an entry with what the others don't know yet, or with everything; ``None``: nothing is new."""
        registered = tuple(Registered(address, role) for address, role in self._registry.registered())
        full = full or registered != self._published_registered
        totals = self._totals()
        told = self._published
        news = totals if full else {name: t for name, t in totals.items() if t.is_news(told.get(name))}
        expected = ExpectedNews() if self.publisher is None else self.publisher.news(full=full)
        if not (full or news or expected.new or expected.over):
            return None
        self._published = {name: news.get(name) or told[name] for name in totals}
        self._published_registered = registered
        if full:
            self._full_at = self._now() + _FULL_S
        return self._entry(news, full=full, registered=registered if full else (), expected=expected)

    def _totals(self) -> dict[str, Totals]:
        totals: dict[str, Totals] = {}
        for x in self._registry.instances():
            part = self._capacity.parts.get(x.instance_id)
            held, wants = (part.held, part.wants) if part is not None else (0, 0)
            totals[x.instance_id] = Totals(x.load.requests, max(0, x.load.tokens), held, wants)
        return totals

    def _entry(self, totals: dict[str, Totals], **fields: Any) -> Entry:
        self._sequence += 1
        return Entry(self.name, self._epoch, self._sequence, totals, count=1 + len(self.peers.live()), **fields)

    # --- what the others publish ---

    def _spread(self) -> None:
        """Add the work that others have in flight to the instances' loads."""
        for x in self._registry.instances():
            x.load.share(*self.peers.in_flight(x.instance_id))

    def _apply_registrations(self) -> None:
        """Set the instances that registered with other replicas; of a silent one, those that still answer."""
        addresses: dict[str, Role] = {}
        ready = {x.address for x in self._registry.instances() if x.ready}
        for peer in self.peers.all():
            for item in peer.registered:
                if not peer.silent or item.address in ready:
                    addresses[item.address] = item.role
        self._registry.set_discovered("replicas", addresses)

    async def _tick(self) -> None:
        """Do what is due whether Redis is reachable or not."""
        while True:
            await asyncio.sleep(_TICK_S)
            if self._doubts and self._now() - self._doubted_at > _CALM_S:
                log.info("the stream of replicas in Redis is believed again")
                self._doubts = False
            for peer in self.peers.expire():
                self.remote_pending.drop(peer.name)
                if self.state is SharedState.SHARED:
                    log.warning("router %s fell silent: its share counts no more", peer.name)
            if self.state is SharedState.SHARED:
                self._apply_registrations()
                await self._reclaim()
            elif self._now() - self._reached_at > LEASE_S / 2:
                self._capacity.alone(max([1 + len(self.peers.all()), *(x.count for x in self.peers.all())]))
            self.remote_pending.tick()
            self._spread()
            self._capacity.keep_only(x.instance_id for x in self._registry.instances())
            free = sum(max(0, part.tracker.limit - part.tracker.requests) for part in self._capacity.parts.values())
            self._registry.waiters.wake(free)

    async def _reclaim(self) -> None:
        """Reclaim the units of replicas that are gone."""
        now = self._now()
        for peer in self.peers.all():
            silent_s = now - peer.heard
            if silent_s < LEASE_S:
                continue
            gone = silent_s > self._config.replica_forget_s
            try:
                left = [await self._reclaim_units(peer, name, gone) for name in list(peer.totals)]
            except redis_errors() as error:
                log.warning("could not take back the units of router %s: %s", peer.name, error)
                return
            if gone and not any(left):
                log.info("router %s is forgotten", peer.name)
                self.peers.forget(peer.name)

    async def _reclaim_units(self, peer: Peer, instance: str, gone: bool) -> bool:
        """Reclaim units at one instance; return whether some are left to the silent replica."""
        totals = peer.totals[instance]
        part = self._capacity.parts.get(instance)
        if part is None or not totals.held:
            return False
        keep = 0 if gone else part.capacity // max(1, peer.count)
        if totals.held <= keep:
            return totals.held > 0
        running = part.tracker.report.num_running + part.tracker.report.num_waiting + part.tracker.report.num_loading
        if running > part.tracker.requests + part.tracker.shared_requests + keep:
            return True  # some of its requests may still run there
        silent_ms = int(1000 * (self._config.replica_forget_s if gone else LEASE_S))
        await self._store.reclaim(peer.name, instance, silent_ms=silent_ms, keep=keep)
        peer.totals[instance] = Totals(totals.requests, totals.tokens, keep, totals.wants)
        return keep > 0
