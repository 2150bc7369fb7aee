"""The RPCs of ``KvStoreService``: checks requests, and passes them to the tiers and to pool I/O."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

from baton.api.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc
from baton.config.kvstore import KVStoreConfig
from baton.errors import BatonError, DeadlineError, InvalidRequestError, QueueFullError
from baton.hashing import HASH_BYTES
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.blocks import BlockSource
from baton.kv_transfer.types import source_from_pb
from baton.rpc.audit import audit, peer_of
from baton.rpc.convert import fingerprint_from_pb, tenant_from_pb
from baton.tracing import UNTRACED, Span, SpanExporter, continue_span
from baton.types import BlockHash, Epoch, InstanceId
from baton_kvstore.events import StoreEvents
from baton_kvstore.memory.pool import RETRY_AFTER_S
from baton_kvstore.metrics import StoreMetrics
from baton_kvstore.tiers.promotion import LeaseRequest
from baton_kvstore.tiers.tiered_store import TieredStore
from baton_kvstore.transfer import FollowerSlots, PoolIO
from baton_kvstore.types import kv_format_of

_MAX_LISTED_TENANTS = 10_000
_MAX_PROGRESS = 2**62
_PROMOTION_SHARE = 0.8
"""Share of a Get's time limit spent on reading blocks from lower tiers: an answer with fewer blocks beats a timeout."""


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServiceServicer):
    """Serves one :class:`BlockStore` and its lower tiers. A failed call leaves no slot reserved and no lease."""

    def __init__(
        self,
        config: KVStoreConfig,
        *,
        instance_id: InstanceId,
        epoch: Epoch,
        tiers: TieredStore,
        pool_io: PoolIO,
        metrics: StoreMetrics,
        events: StoreEvents,
        spans: SpanExporter | None = None,
    ) -> None:
        self._config = config
        self._instance_id = instance_id
        self._epoch = epoch
        self._tiers = tiers
        self._store = tiers.store
        self._pool_io = pool_io
        self._metrics = metrics
        self._events = events
        self._spans = spans
        self._pull_slots = asyncio.Semaphore(config.pull_workers)
        self._follower_slots = FollowerSlots(config.capacity_bytes)
        self._num_puts = 0

    async def StreamStoreEvents(
        self, request: kvstore_pb2.StreamStoreEventsRequest, context: Any
    ) -> AsyncIterator[kvstore_pb2.StreamStoreEventsResponse]:
        """Stream which blocks enter and leave the tiers."""
        batches = self._events.follow(
            request.from_sequence,
            request.epoch,
            heartbeat_s=request.heartbeat_ms / 1000,
            gather_s=request.gather_ms / 1000,
            packed=request.packed,
        )
        async with aclosing(batches):
            async for batch in batches:
                yield kvstore_pb2.StreamStoreEventsResponse(batch=batch)

    async def Put(self, request: kvstore_pb2.PutRequest, context: Any) -> kvstore_pb2.PutResponse:
        """Pull the missing blocks from the source; see ``kvstore.proto``.

        Raises:
            BatonError: The Put was not completed. Blocks stored before the failure stay: with lower tiers, a large Put
                is processed in pieces.
        """
        with self._counted("Put"):
            if request.ttl_s and request.durable:
                raise InvalidRequestError("blocks with a time to live are kept in memory only", field="ttl_s")
            fingerprint = read_fingerprint(request.fingerprint)
            hashes = self._hashes(request.block_hashes)
            source = source_from_pb(request.source)
            _check_source(request, fingerprint, source)
            left = context.time_remaining()
            deadline = time.monotonic() + min(self._config.pull_timeout_s, left if left is not None else float("inf"))
            _check_distinct(hashes)
            stored: list[bool] = []
            num_bytes = 0
            follows = request.HasField("ready")
            size = len(hashes) * fingerprint.block_bytes
            async with self._follower_slots.admit(size) if follows else self._admit_put(deadline) as admitted:
                step = self._tiers.piece_size(fingerprint, len(hashes))
                while admitted and len(stored) < len(hashes):
                    piece = slice(len(stored), len(stored) + step)
                    results, count = await self._put_blocks(fingerprint, piece, request, source, deadline)
                    stored += results
                    num_bytes += count
            stored += [False] * (len(hashes) - len(stored))
            if request.pin:
                self._store.pin_for_client(fingerprint, [name for name, ok in zip(hashes, stored, strict=True) if ok])
            if request.durable:
                durable = await self._tiers.saver.persist(kv_format_of(fingerprint), hashes, deadline)
                return kvstore_pb2.PutResponse(stored=stored, bytes=num_bytes, durable=durable)
            return kvstore_pb2.PutResponse(stored=stored, bytes=num_bytes)

    async def Get(self, request: kvstore_pb2.GetRequest, context: Any) -> kvstore_pb2.GetResponse:
        """Lease the longest stored prefix of a chain."""
        span = continue_span("kvstore.Get", request.traceparent, self._spans)
        with self._counted("Get", span):
            ttl_s = min(request.lease_ms / 1000 or self._config.default_lease_s, self._config.max_lease_s)
            hashes = self._hashes(request.block_hashes)
            left = request.wait_ms / 1000 or context.time_remaining()
            wait_s = (
                self._config.pull_timeout_s
                if left is None
                else min(_PROMOTION_SHARE * left, self._config.pull_timeout_s)
            )
            fingerprint = read_fingerprint(request.fingerprint)
            tenant = tenant_from_pb(request.tenant)
            wanted = LeaseRequest(fingerprint, time.monotonic() + wait_s, ttl_s, tenant)
            lease, more = await self._tiers.get(hashes, wanted)
            if span.recording:
                num_found = 0 if lease is None else len(lease.entries)
                span.attributes.update({"baton.blocks_asked": len(hashes), "baton.blocks_found": num_found})
            if lease is None:
                return kvstore_pb2.GetResponse()
            pool = lease.entries[0].pool
            try:
                source = self._pool_io.source(pool)
            except BaseException:
                self._store.release(lease.lease_id)
                raise
            slots = [entry.slot for entry in lease.entries]
            return kvstore_pb2.GetResponse(
                lease_id=lease.lease_id,
                source=source,
                block_ids=slots,
                generations=pool.arena.generations[slots].tolist(),
                lease_ms=round(1000 * ttl_s),
                more=more,
            )

    async def Release(self, request: kvstore_pb2.ReleaseRequest, context: Any) -> kvstore_pb2.ReleaseResponse:
        with self._counted("Release"):
            released = self._store.release(request.lease_id)
            self._tiers.saver.kick()
            return kvstore_pb2.ReleaseResponse(found=released)

    async def Contains(self, request: kvstore_pb2.ContainsRequest, context: Any) -> kvstore_pb2.ContainsResponse:
        """Count the leading blocks that are stored in any tier."""
        with self._counted("Contains"):
            num_blocks = await self._tiers.contains(
                read_fingerprint(request.fingerprint),
                self._hashes(request.block_hashes),
                tenant_from_pb(request.tenant),
            )
            return kvstore_pb2.ContainsResponse(num_blocks=num_blocks)

    async def Delete(self, request: kvstore_pb2.DeleteRequest, context: Any) -> kvstore_pb2.DeleteResponse:
        """Delete blocks; a block that is named twice counts once."""
        with self._counted("Delete"):
            peer = peer_of(context)
            if bool(request.all) + bool(request.block_hashes) + bool(request.tenant) > 1:
                raise InvalidRequestError("name blocks, set all, or name a tenant: one of them", field="all")
            hashes = None if request.all or request.tenant else self._hashes(request.block_hashes)
            if request.tenant:
                deleted = await self._tiers.delete_tenant(request.tenant)
            else:
                deleted = await self._tiers.delete(read_fingerprint(request.fingerprint), hashes)
            what = "all" if request.all else f"tenant {request.tenant}" if request.tenant else "blocks"
            audit("deleted", what=what, blocks=deleted, peer=peer)
            return kvstore_pb2.DeleteResponse(num_deleted=deleted)

    async def Pin(self, request: kvstore_pb2.PinRequest, context: Any) -> kvstore_pb2.PinResponse:
        """Pin blocks in memory, or unpin them."""
        with self._counted("Pin"):
            fingerprint = read_fingerprint(request.fingerprint)
            hashes = self._hashes(request.block_hashes)
            _check_distinct(hashes)
            if request.unpin:
                self._store.unpin_for_client(fingerprint, hashes)
                self._tiers.saver.kick()
                return kvstore_pb2.PinResponse(pinned=[False] * len(hashes))
            return kvstore_pb2.PinResponse(pinned=self._store.pin_for_client(fingerprint, hashes))

    async def ListTenants(
        self, request: kvstore_pb2.ListTenantsRequest, context: Any
    ) -> kvstore_pb2.ListTenantsResponse:
        """Return the usage and quotas of the largest tenants."""
        uses = [
            kvstore_pb2.TenantUse(
                tenant=use.name,
                num_blocks=use.num_blocks,
                used_bytes=use.used_bytes,
                quota_bytes=use.quota_bytes,
                pinned_bytes=use.pinned_bytes,
                num_evictions=use.evictions,
                disk_bytes=use.disk_bytes,
                disk_quota_bytes=use.disk_quota_bytes,
            )
            for use in self._store.quotas.largest(_MAX_LISTED_TENANTS)
        ]
        return kvstore_pb2.ListTenantsResponse(tenants=uses)

    async def GetStoreInfo(
        self, request: kvstore_pb2.GetStoreInfoRequest, context: Any
    ) -> kvstore_pb2.GetStoreInfoResponse:
        """Return the store's identity and usage. Endpoints differ per KV format, so each Get returns them instead."""
        self._store.expire()
        stats = self._store.stats()
        return kvstore_pb2.GetStoreInfoResponse(
            instance_id=self._instance_id,
            epoch=self._epoch,
            capacity_bytes=stats.capacity_bytes,
            used_bytes=stats.used_bytes,
            num_blocks=stats.num_blocks,
            num_hits=stats.hits,
            num_misses=stats.misses,
            num_evictions=stats.evictions,
            num_leases=stats.num_leases,
        )

    async def _put_blocks(
        self,
        fingerprint: Fingerprint,
        piece: slice,
        request: kvstore_pb2.PutRequest,
        source: BlockSource,
        deadline: float,
    ) -> tuple[list[bool], int]:
        """Store one piece of a Put's blocks; return which are stored, and the bytes pulled."""
        names = [BlockHash(value) for value in request.block_hashes[piece]]
        stored = [False] * len(names)
        if not (request.ttl_s or request.pin):  # these must be in memory, also if a lower tier holds them
            stored = await self._tiers.stored_below(fingerprint, names, deadline, durable=request.durable)
        wanted = [i for i, is_stored in enumerate(stored) if not is_stored]
        if not wanted:
            return stored, 0
        await self._tiers.saver.make_room(len(wanted) * fingerprint.block_bytes, deadline)
        reservation = self._store.reserve(fingerprint, [names[i] for i in wanted], tenant_from_pb(request.tenant))
        arrived = [False] * len(reservation.missing)
        num_bytes = 0
        try:
            if reservation.missing:
                at = [piece.start + wanted[i] for i in reservation.missing]
                reads = [request.block_ids[i] for i in at], [request.generations[i] for i in at], reservation.slots
                ready = request.ready if request.HasField("ready") else None
                result = await self._pool_io.pull(reservation.pool, source, reads, deadline, ready)
                arrived = [bool(ok) for ok in result.valid]
                num_bytes = result.num_bytes
                self._metrics.pulled_bytes.labels(result.pipe_kind).inc(num_bytes)
                self._metrics.refused_blocks.inc(arrived.count(False))
        finally:
            committed = self._store.commit(reservation, arrived, ttl_s=float(request.ttl_s))
            self._tiers.saver.kick()
        for i, is_stored in zip(wanted, committed, strict=True):
            stored[i] = is_stored
        return stored, num_bytes

    @asynccontextmanager
    async def _admit_put(self, deadline: float) -> AsyncIterator[bool]:
        """Wait until the Put may pull, then yield ``True``; it must not reserve slots before."""
        if self._num_puts >= self._config.max_pending_puts:
            raise QueueFullError(f"{self._num_puts} Puts are waiting", retry_after_s=RETRY_AFTER_S)
        self._num_puts += 1
        try:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._pull_slots.acquire()
            except TimeoutError:
                raise DeadlineError("the Put had to wait too long for others") from None
            try:
                yield True
            finally:
                self._pull_slots.release()
        finally:
            self._num_puts -= 1

    @contextmanager
    def _counted(self, method: str, span: Span = UNTRACED) -> Iterator[None]:
        started = time.perf_counter()
        code = "ok"
        try:
            yield
        except BatonError as error:
            code = error.code
            raise
        except asyncio.CancelledError:
            code = "cancelled"
            raise
        except BaseException:
            code = "internal"
            raise
        finally:
            self._metrics.calls.labels(method, code).inc()
            self._metrics.seconds.labels(method).observe(time.perf_counter() - started)
            if span.recording:
                span.attributes["baton.instance"] = self._instance_id
                span.end(code)

    def _hashes(self, values: Sequence[bytes]) -> list[BlockHash]:
        limit = self._config.max_blocks_per_call
        if not 1 <= len(values) <= limit:
            raise InvalidRequestError(f"a call names 1 to {limit} blocks, got {len(values)}", field="block_hashes")
        for i, value in enumerate(values):
            if len(value) != HASH_BYTES:
                raise InvalidRequestError(
                    f"a block hash has {HASH_BYTES} bytes, got {len(value)}", field=f"block_hashes[{i}]"
                )
        return [BlockHash(value) for value in values]


def _check_source(request: kvstore_pb2.PutRequest, fingerprint: Fingerprint, source: BlockSource) -> None:
    source_fingerprint = source.fingerprint.undivided()
    if fingerprint.kv_cast and source_fingerprint.kv_cast:
        source_fingerprint = source_fingerprint.kept_as(fingerprint.kv_dtype)  # converted during the transfer
    fingerprint.require_equal(source_fingerprint, who="source")
    for name in ("block_ids", "generations"):
        count = len(getattr(request, name))
        if count != len(request.block_hashes):
            raise InvalidRequestError(f"{name} has {count} entries for {len(request.block_hashes)} hashes", field=name)
    if request.ready > _MAX_PROGRESS:
        raise InvalidRequestError(f"ready is at most {_MAX_PROGRESS}, got {request.ready}", field="ready")
    for i, block_id in enumerate(request.block_ids):
        if block_id >= source.num_blocks:
            raise InvalidRequestError(
                f"block {block_id} is not in a pool of {source.num_blocks}", field=f"block_ids[{i}]"
            )


def _check_distinct(hashes: Sequence[BlockHash]) -> None:
    if len(set(hashes)) != len(hashes):
        raise InvalidRequestError("block_hashes names a block twice", field="block_hashes")


_MAX_CACHED_BYTES = 65536
"""Maximum size of a serialized fingerprint that is cached; a model with a thousand layers needs less."""


def read_fingerprint(message: common_pb2.Fingerprint) -> Fingerprint:
    """Read a fingerprint, without its division over ranks: the store keeps blocks undivided.

    Raises:
        InvalidRequestError: It is missing, or the layer shapes are not triples.
    """
    if not message.block_bytes:
        raise InvalidRequestError("a fingerprint is needed, with block_bytes", field="fingerprint")
    data = message.SerializeToString()
    return _read(data) if len(data) <= _MAX_CACHED_BYTES else fingerprint_from_pb(message).undivided()


@functools.lru_cache(maxsize=64)
def _read(data: bytes) -> Fingerprint:
    return fingerprint_from_pb(common_pb2.Fingerprint.FromString(data)).undivided()
