"""Client of one node of the KV store: calls over gRPC, bytes over pipes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from baton.api.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc
from baton.background import is_cancelled
from baton.errors import DeadlineError, TransferError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.blocks import BlockFetcher, BlockSource, FetchResult, SequenceBlocks
from baton.kv_transfer.connector.store.backend import (
    LoadCall,
    SaveCall,
    SaveResult,
    StoreBackend,
    num_leading,
)
from baton.kv_transfer.types import source_from_pb, source_to_pb
from baton.rpc.channel import open_channel
from baton.rpc.convert import fingerprint_to_pb, tenant_to_pb
from baton.rpc.errors import from_rpc_error, readable
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls
from baton.types import BlockHash, BlockId, Tenant

log = logging.getLogger(__name__)

_LATE_S = 15.0
"""Time limit in seconds of a Release, and of a Get that no load waits for any more."""
_LEASE_MARGIN_S = 1.0


@dataclass(frozen=True, slots=True)
class StoreLease:
    """Blocks that a store keeps for a reader.

    Attributes:
        lease_id: Number under which the lease is released.
        source: Pool of the store that holds the blocks.
        block_ids: Blocks of that pool, int64 [n].
        generations: Their generations, uint64 [n].
        more: The store holds more of the requested blocks, to be leased after this lease was released.
    """

    lease_id: int
    source: BlockSource
    block_ids: npt.NDArray[np.int64]
    generations: npt.NDArray[np.uint64]
    more: bool

    def __len__(self) -> int:
        return len(self.block_ids)


class StoreCalls:
    """Calls of one store, each a future; used in one event loop. The connection is made with the first call.

    Args:
        address: ``host:port`` of the store.
        token: Shared token of the services, if they use one.
        tls: Certificates of the services, if they use TLS.
    """

    def __init__(self, address: str, *, token: Token | None, tls: Tls | None) -> None:
        self._address = address
        self._token = token
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._posts: set[asyncio.Future[Any]] = set()
        self._closed = False

    def begin(self, method: str, request: Any, timeout_s: float) -> asyncio.Future[Any]:
        """Begin a call; cancelling the future cancels the call.

        Args:
            method: Name of the RPC.
            request: Request message of the RPC.
            timeout_s: Time limit in seconds on both sides.

        Returns:
            A future of the response, or of a BatonError: the store's, or that it was not reached in time.
        """
        return asyncio.get_running_loop().create_task(self._call(method, request, timeout_s))

    def post(self, method: str, request: Any, timeout_s: float) -> None:
        """Make a call in the background whose answer is not needed; a failure is logged."""
        if not self._closed:
            call = self.begin(method, request, timeout_s)
            self._posts.add(call)
            call.add_done_callback(self._on_posted)

    async def close(self) -> None:
        """Close the connection; running and later calls fail."""
        self._closed = True
        posts = list(self._posts)
        for call in posts:
            call.cancel()
        if posts:
            await asyncio.wait(posts)
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = None

    async def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        if self._closed:
            raise TransferError(f"the connection to the store {self._address} was closed")
        if self._channel is None:
            self._channel = open_channel(self._address, token=self._token, tls=self._tls)
            self._stub = kvstore_pb2_grpc.KvStoreServiceStub(self._channel)
        try:
            return readable(await getattr(self._stub, method)(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except grpc.aio.UsageError as error:  # the channel was closed under us
            raise TransferError(f"the connection to the store was closed: {error}") from error
        except asyncio.CancelledError:
            if is_cancelled() or not self._closed:
                raise
            # Closing the channel cancels its calls; a cluster load that waits for this one goes on with another node.
            raise TransferError(f"the connection to the store {self._address} was closed") from None

    def _on_posted(self, call: asyncio.Future[Any]) -> None:
        self._posts.discard(call)
        if not call.cancelled() and (error := call.exception()) is not None:
            log.info("the store %s did not get a release: %s", self._address, error)


class StoreClient(StoreBackend):
    """Client of one node. All methods run in one event loop; the connection is made with the first call.

    Args:
        address: ``host:port`` of the store.
        fingerprint: Fingerprint of the stored KV: this instance's KV, in its own type or one it can convert to.
        fetcher: Copies blocks into this instance's pool.
        token: Shared token of the services, if they use one.
        tls: Certificates of the services, if they use TLS.
        call_timeout_s: Time limit in seconds of a call that moves no bytes.
        blocks_per_call: Largest number of blocks in one call; longer chains take several.
    """

    follows: ClassVar[bool] = True

    def __init__(
        self,
        address: str,
        *,
        fingerprint: Fingerprint,
        fetcher: BlockFetcher,
        token: Token | None,
        tls: Tls | None = None,
        call_timeout_s: float,
        blocks_per_call: int,
    ) -> None:
        self.name = address
        self._calls = StoreCalls(address, token=token, tls=tls)
        self._fingerprint = fingerprint_to_pb(fingerprint)
        self._fetcher = fetcher
        self._call_timeout_s = call_timeout_s
        self._blocks_per_call = blocks_per_call
        self._forgone: set[asyncio.Future[Any]] = set()
        self._source: tuple[bytes, BlockSource] | None = None  # the latest; a store of one kind of KV has only one

    async def save(self, call: SaveCall) -> SaveResult:
        stored, num_bytes = await self.put_blocks(
            call.source,
            call.part.wanted,
            call.block_ids,
            call.generations,
            deadline=call.deadline,
            tenant=call.part.tenant,
            ready=call.ready,
        )
        return SaveResult(sum(stored), num_bytes)

    async def load(self, call: LoadCall) -> None:
        part = call.part
        progress = call.progress
        hashes = part.wanted
        start = 0
        while start < len(hashes):
            piece = hashes[start : start + self._blocks_per_call]
            lease = await self.lease(piece, deadline=call.deadline, tenant=part.tenant, traceparent=part.traceparent)
            if lease is None:
                return
            count = len(lease)
            try:
                targets = call.block_ids[start : start + count]
                result = await self.fetch(lease, targets, deadline=call.deadline, cancelled=call.cancelled)
            finally:
                self.release(lease)
            progress.num_blocks += num_leading(result.valid)
            progress.num_bytes += result.num_bytes
            progress.seconds += result.seconds
            progress.pipe = result.pipe_kind
            progress.source = lease.source.instance_id
            start += count
            if progress.num_blocks < start or (count < len(piece) and not lease.more):
                return

    async def put_blocks(
        self,
        source: BlockSource,
        hashes: Sequence[BlockHash],
        block_ids: Sequence[int],
        generations: Sequence[int],
        *,
        deadline: float,
        tenant: Tenant | None = None,
        ready: int | None = None,
    ) -> tuple[list[bool], int]:
        """Let the store pull blocks from a pool or from another store.

        Args:
            source: Pool that holds the blocks.
            hashes: Hashes of the blocks, at most ``blocks_per_call``, of one chain or several.
            block_ids: Blocks of the pool, parallel to ``hashes``.
            generations: Parallel to ``hashes``; a block whose generation changes is not stored.
            deadline: Time limit, in seconds of ``time.monotonic()``.
            tenant: Tenant that owns the blocks; ``None``: no tenant.
            ready: Progress of the pool before it computes the blocks; ``None``: they are complete.

        Returns:
            Per block whether the store holds it now, and the number of bytes that moved.

        Raises:
            BatonError: The store refused or was not reached.
        """
        request = kvstore_pb2.PutRequest(
            fingerprint=self._fingerprint,
            block_hashes=hashes,
            source=source_to_pb(source),
            block_ids=block_ids,
            generations=generations,
            tenant=tenant_to_pb(tenant),
            ready=ready,
        )
        response = await self._calls.begin("Put", request, _seconds_left(deadline))
        if len(response.stored) != len(hashes):
            raise TransferError(f"the store answered of {len(response.stored)} blocks for {len(hashes)}")
        return list(response.stored), response.bytes

    async def contains(self, hashes: Sequence[BlockHash], *, tenant: Tenant | None = None) -> int:
        """Return how many leading blocks of a chain the store holds; it begins to promote them to memory.

        Args:
            hashes: Hashes of the chain, at most ``blocks_per_call``.
            tenant: Tenant that owns the blocks; ``None``: no tenant.

        Raises:
            BatonError: The store refused or was not reached.
        """
        request = kvstore_pb2.ContainsRequest(
            fingerprint=self._fingerprint, block_hashes=hashes, tenant=tenant_to_pb(tenant)
        )
        answer: kvstore_pb2.ContainsResponse = await self._calls.begin("Contains", request, self._call_timeout_s)
        return answer.num_blocks

    async def lease(
        self, hashes: Sequence[BlockHash], *, deadline: float, tenant: Tenant | None = None, traceparent: str = ""
    ) -> StoreLease | None:
        """Have the store keep the longest prefix of some blocks; ``None``: it does not hold the first one.

        Args:
            hashes: Hashes of the blocks, at most ``blocks_per_call``.
            deadline: End of the lease, in seconds of ``time.monotonic()``; the answer comes sooner.
            tenant: Tenant that owns the blocks; ``None``: no tenant.
            traceparent: W3C trace context of the request that loads the blocks; empty: not traced.

        Raises:
            BatonError: The store refused or was not reached.
        """
        left = _seconds_left(deadline)
        patience = min(self._call_timeout_s, left)
        request = kvstore_pb2.GetRequest(
            fingerprint=self._fingerprint,
            block_hashes=hashes,
            lease_ms=round(1000 * (left + _LEASE_MARGIN_S)),
            tenant=tenant_to_pb(tenant),
            wait_ms=max(1, round(1000 * patience)),
            traceparent=traceparent,
        )
        # The call outlives the patience: a lease whose answer is not read would hold the store's memory until it ends.
        call = self._calls.begin("Get", request, patience + _LATE_S)
        try:
            async with asyncio.timeout(patience):
                answer = await asyncio.shield(call)
        except TimeoutError:
            self._forgo(call)
            raise DeadlineError("the store did not answer in time") from None
        except asyncio.CancelledError:
            self._forgo(call)
            raise
        if not answer.lease_id:
            return None
        try:
            count = len(answer.block_ids)
            if not 0 < count <= len(hashes) or len(answer.generations) != count:
                raise TransferError(f"the store answered with {count} blocks of {len(hashes)}")
            return StoreLease(
                answer.lease_id,
                self._source_of(answer.source),
                np.fromiter(answer.block_ids, np.int64, count),
                np.fromiter(answer.generations, np.uint64, count),
                answer.more,
            )
        except BaseException:
            self._post_release(answer.lease_id)
            raise

    async def fetch(
        self, lease: StoreLease, block_ids: Sequence[BlockId], *, deadline: float, cancelled: threading.Event
    ) -> FetchResult:
        """Copy the first blocks of a lease.

        Args:
            lease: A lease that was not released yet.
            block_ids: Blocks of this instance's pool to fill, at most as many as are leased.
            deadline: Time limit, in seconds of ``time.monotonic()``.
            cancelled: Ends the fetch when set.

        Raises:
            BatonError: The fetch failed; no block of it may be used.
        """
        count = len(block_ids)
        blocks = SequenceBlocks.pairs(
            lease.block_ids[:count], lease.generations[:count], np.asarray(block_ids, np.int64)
        )
        return await self._fetcher.fetch_async(lease.source, blocks, deadline=deadline, cancelled=cancelled)

    def release(self, lease: StoreLease) -> None:
        """Release a lease in the background."""
        self._post_release(lease.lease_id)

    async def ping(self) -> None:
        """Check that the store answers.

        Raises:
            BatonError: It did not answer in time.
        """
        await self._calls.begin("GetStoreInfo", kvstore_pb2.GetStoreInfoRequest(), self._call_timeout_s)

    async def close(self) -> None:
        """Close the connection; leases that were not released expire."""
        for call in self._forgone:
            call.cancel()
        if self._forgone:
            await asyncio.wait(self._forgone)
        await self._calls.close()

    def _forgo(self, call: asyncio.Future[Any]) -> None:
        """Release the lease that a call may still return although no load waits for it."""

        def on_answer(call: asyncio.Future[Any]) -> None:
            self._forgone.discard(call)
            if not call.cancelled() and call.exception() is None and call.result().lease_id:
                self._post_release(call.result().lease_id)

        self._forgone.add(call)
        call.add_done_callback(on_answer)

    def _post_release(self, lease_id: int) -> None:
        self._calls.post("Release", kvstore_pb2.ReleaseRequest(lease_id=lease_id), _LATE_S)

    def _source_of(self, message: common_pb2.KvSource) -> BlockSource:
        data = message.SerializeToString()
        if self._source is None or self._source[0] != data:
            self._source = data, source_from_pb(message)
        return self._source[1]


def _seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError("no time is left for the store")
    return left
