"""The KV stores whose contents the router knows, from their own events; instances that use a store load from it.

A store's blocks are in the same index as the instances', in slots of its own, one per tier. For an instance that was
started with that store they count as one more lower tier, beyond its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import grpc
import grpc.aio
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.api.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.background import create_task, keep_running
from baton.config.router import RouterConfig
from baton.config.stores import DISCOVER
from baton.errors import UnavailableError
from baton.kv_transfer.connector.store.cluster import RedisMembership
from baton.rpc.channel import Backoff
from baton.rpc.errors import call_unary
from baton.rpc.service_token import Token
from baton.types import Epoch
from baton_router.indexer.events import GATHER_BEATS, STORE_TIERS, EventApplier, EventSubscriber, IndexMetrics
from baton_router.indexer.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

_NO_EVENTS_S = 60.0

OpenChannel = Callable[[str], grpc.aio.Channel]


class Store:
    """One store process: its address, its name once it answered, and its part of the index."""

    def __init__(self, address: str, channel: grpc.aio.Channel, events: EventApplier) -> None:
        self.address = address
        self.channel = channel
        self.events = events
        self.name = address
        self.stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)  # type: ignore[no-untyped-call, unused-ignore]

    @property
    def tiers(self) -> dict[str, int]:
        """Number of blocks in the index of each tier that the store has reported."""
        return {STORE_TIERS[tier]: blocks for tier, blocks in self.events.num_lower_blocks.items()}


class Stores(Collector):
    """All stores that the configuration names, or that register in Redis.

    Args:
        config: Addresses and intervals.
        index: Index of their blocks.
        metrics: Counters of events.
        open_channel: Opens a channel to an address.
        now: Monotonic clock, in seconds.
        token: Shared token of the services, which signs registrations in Redis.
        refused: Called with the number of registrations that a read skipped.
    """

    def __init__(
        self,
        config: RouterConfig,
        index: PrefixIndex,
        metrics: IndexMetrics,
        open_channel: OpenChannel,
        now: Callable[[], float],
        token: Token | None = None,
        refused: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._index = index
        self._metrics = metrics
        self._open = open_channel
        self._now = now
        self._links: dict[str, tuple[Store, asyncio.Task[None]]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._membership: RedisMembership | None = None
        if config.kv_events and DISCOVER in config.kvstore:
            self._membership = RedisMembership(config.redis, config.redis_prefix, token, refused)
        self._starting: asyncio.Task[None] | None = None
        self._rng = random.Random()

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[Store]:
        return (store for store, _ in self._links.values())

    def start(self) -> None:
        """Begin to follow the stores; needs a running loop."""
        if self._membership is not None:
            self._starting = keep_running(partial(self._discover, self._membership), "discovery of stores")
        elif self._config.kv_events:
            self.set(self._config.kvstore)

    async def _discover(self, membership: RedisMembership) -> None:
        with contextlib.suppress(UnavailableError):  # start does not wait for Redis; the search goes on until the end
            await membership.start(self, deadline=time.monotonic())

    def set(self, names: Iterable[str]) -> None:
        """Set the addresses of the stores."""
        wanted = set(names)
        for address in self._links.keys() - wanted:
            store, task = self._links.pop(address)
            log.info("the KV store %s left", store.name)
            leave = create_task(self._close_store(store, task), "close store", detail=address)
            self._leaving.add(leave)
            leave.add_done_callback(self._leaving.discard)
        for address in sorted(wanted - self._links.keys()):
            store = Store(address, self._open(address), self.make_applier())
            self._links[address] = store, keep_running(partial(self._run, store), "store", detail=address)

    async def _close_store(self, store: Store, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        store.events.close()
        await store.channel.close(None)

    def make_applier(self) -> EventApplier:
        """Return an empty part of the index for one store."""
        return EventApplier(
            self._index, now=self._now, stale_limit_s=self._config.index_stale_limit_s, decision_ttl_s=0.0
        )

    async def close(self) -> None:
        """End every stream and channel."""
        if self._starting is not None:
            await self._starting
        if self._membership is not None:
            await self._membership.close()
        self.set(())
        await asyncio.gather(*self._leaving)

    def tick(self) -> None:
        """Drop what is too old to be used."""
        for store in self:
            store.events.tick()

    def stood_still(self, seconds: float) -> None:
        """Record that the router itself stood still."""
        for store in self:
            store.events.stood_still(seconds)

    def tiers(self, kvstore: str) -> tuple[tuple[str, int], ...]:
        """Return the tiers that an instance can load from, nearest first, each with the slots of it and nearer ones.

        Args:
            kvstore: The instance's ``--kvstore``; empty: it uses none.
        """
        if not self._links or not kvstore:
            return ()
        return _tiers(store.events for store in self if _uses(kvstore, store.address))

    async def _run(self, store: Store) -> None:
        """Connect, and connect again, until cancelled."""
        backoff = Backoff(self._config.reconnect_max_s, self._rng)
        follower = EventSubscriber(store.events, self._metrics, self._config.index_heartbeat_ms / 1000)
        while True:
            epoch = await self._ask(store)
            if epoch is None:
                # Gone: blocks in its memory are lost, and those on its disk cannot be loaded now.
                store.events.lost()
            elif not await self._follow(store, epoch, follower):
                log.warning("the KV store %s tells no events: its blocks count nowhere", store.name)
                await asyncio.sleep(_NO_EVENTS_S)
            elif follower.heard:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _ask(self, store: Store) -> Epoch | None:
        """Return the epoch of the store's process; ``None``: it does not answer."""
        try:
            request = kvstore_pb2.GetStoreInfoRequest()
            info = await call_unary(store.stub.GetStoreInfo, request, timeout=self._config.probe_timeout_s)
        except grpc.aio.AioRpcError as error:
            if store.events.usable and store.events.num_lower_blocks:
                log.warning("the KV store at %s does not answer: %s", store.address, error.code().name)
            return None
        store.name = info.instance_id or store.address
        if store.events.restarted(Epoch(info.epoch)):
            log.info("the KV store %s restarted", store.name)
        return Epoch(info.epoch)

    async def _follow(self, store: Store, epoch: Epoch, follower: EventSubscriber) -> bool:
        request = kvstore_pb2.StreamStoreEventsRequest(
            from_sequence=store.events.resume_from(epoch),
            epoch=epoch,
            heartbeat_ms=self._config.index_heartbeat_ms,
            gather_ms=int(GATHER_BEATS * self._config.index_heartbeat_ms),
            packed=True,
        )
        return await follower.follow(store.name, store.stub.StreamStoreEvents(request))

    def collect(self) -> Iterator[Metric]:
        """Yield what is known of every store."""
        blocks = GaugeMetricFamily(
            "baton_router_store_blocks", "Blocks in the index of a KV store's tier", labels=["store", "tier"]
        )
        state = GaugeMetricFamily(
            "baton_router_store_index_state",
            "1 for the state that holds of a KV store's part of the index: exact, stale or off",
            labels=["store", "state"],
        )
        for store in self:
            state.add_metric([store.name, store.events.state.value], 1.0)
            for tier, count in store.tiers.items():
                blocks.add_metric([store.name, tier], count)
        yield blocks
        yield state


def _uses(configured: str, address: str) -> bool:
    """Whether an instance with this ``--kvstore`` loads from the store at an address."""
    return configured == DISCOVER or address in configured.split(",")


def _tiers(appliers: Iterable[EventApplier]) -> tuple[tuple[str, int], ...]:
    """Join the tiers of several stores: a block may come from any of them."""
    usable: Sequence[dict[str, int]] = [dict(events.lower_slots) for events in appliers if events.usable]
    tiers = []
    slots = 0
    for tier, name in STORE_TIERS.items():
        of_tier = [own[tier] for own in usable if tier in own]
        if of_tier:
            for slot in of_tier:
                slots |= 1 << slot
            tiers.append((name, slots))
    return tuple(tiers)
