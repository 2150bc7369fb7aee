"""The KV store as its clients see it: calls over gRPC, bytes over pipes."""

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
from baton.errors import DeadlineError, TransferError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.blocks import BlockFetcher, BlockSource, FetchResult, SequenceBlocks
from baton.kv_transfer.connector.store.backend import ChainPart, LoadProgress
from baton.kv_transfer.types import source_from_pb, source_to_pb
from baton.rpc.channel import open_channel
from baton.rpc.convert import fingerprint_to_pb, tenant_to_pb
from baton.rpc.errors import from_rpc_error, readable
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls
from baton.types import BlockHash, BlockId, Tenant

log = logging.getLogger(__name__)

_LATE_S = 15.0
"""How long a store may take to hear that a lease is given back, or to answer a Get that no load waits for any more."""
_LEASE_MARGIN_S = 1.0


@dataclass(frozen=True, slots=True)
class StoreLease:
    """Blocks that a store keeps for a reader.

    Attributes:
        lease_id: Its name.
        source: Where they can be read.
        block_ids: int64 [n].
        generations: uint64 [n].
        more: The store has more of what was asked for, to be asked for again once these are given back.
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
        token: Shared token, if the services use one.
        tls: Certificates, if they use some.
    """

    def __init__(self, address: str, *, token: Token | None, tls: Tls | None) -> None:
        self._address, self._token, self._tls = address, token, tls
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._posts: set[asyncio.Future[Any]] = set()
        self._closed = False

    def begin(self, method: str, request: Any, timeout_s: float) -> asyncio.Future[Any]:
        """Begin a call; cancelling the future cancels the call.

        Args:
            method: Its name.
            request: Its message.
            timeout_s: Seconds until both sides give up.

        Returns:
            The response, or a BatonError: what the store raised, or that it was not reached in time.
        """
        return asyncio.get_running_loop().create_task(self._call(method, request, timeout_s))

    def post(self, method: str, request: Any, timeout_s: float) -> None:
        """Make a call whose answer is not needed; a failure is logged."""
        if not self._closed:
            call = self.begin(method, request, timeout_s)
            self._posts.add(call)
            call.add_done_callback(self._posted)

    async def close(self) -> None:
        """Close the connection; running calls fail, and later ones, too."""
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
            task = asyncio.current_task()
            if task is None or task.cancelling() or not self._closed:
                raise
            # Closing the channel cancels its calls; who waits for this one goes on with another node.
            raise TransferError(f"the connection to the store {self._address} was closed") from None

    def _posted(self, call: asyncio.Future[Any]) -> None:
        self._posts.discard(call)
        if not call.cancelled() and (error := call.exception()) is not None:
            log.info("the store %s was not told: %s", self._address, error)


class StoreClient:
    """Speaks to one store. All methods run in one event loop; the connection is made with the first call.

    Args:
        address: ``host:port`` of the store.
        fingerprint: Of what the store keeps: this instance's KV, in its type or in one that both sides convert.
        fetcher: Copies blocks into this instance's pool.
        token: Shared token, if the services use one.
        tls: Certificates, if they use some.
        call_timeout_s: Seconds that the store has for an answer that moves no bytes.
        blocks_per_call: Blocks in one call; longer chains take several.
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
        self._calls = StoreCalls(address, token=token, tls=tls)
        self._fingerprint = fingerprint_to_pb(fingerprint)
        self._fetcher = fetcher
        self._call_timeout_s, self._blocks_per_call = call_timeout_s, blocks_per_call
        self._forgone: set[asyncio.Future[Any]] = set()
        self._source: tuple[bytes, BlockSource] | None = None  # the latest; a store of one kind of KV has only one

    async def save(
        self,
        source: BlockSource,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        *,
        deadline: float,
        ready: int | None = None,
    ) -> tuple[int, int]:
        """Let the store pull blocks; see :meth:`FollowingBackend.save`."""
        stored, num_bytes = await self.put(
            source, part.wanted, block_ids, generations, deadline=deadline, tenant=part.tenant, ready=ready
        )
        return sum(stored), num_bytes

    async def load(
        self,
        part: ChainPart,
        block_ids: Sequence[BlockId],
        progress: LoadProgress,
        *,
        deadline: float,
        cancelled: threading.Event,
    ) -> None:
        """Copy the longest prefix that the store holds; see :meth:`StoreBackend.load`."""
        hashes, at = part.wanted, 0
        while at < len(hashes):
            piece = hashes[at : at + self._blocks_per_call]
            lease = await self.lease(piece, deadline=deadline, tenant=part.tenant, traceparent=part.traceparent)
            if lease is None:
                return
            count = len(lease)
            try:
                result = await self.fetch(lease, block_ids[at : at + count], deadline=deadline, cancelled=cancelled)
            finally:
                self.release(lease)
            progress.num_blocks += leading(result.valid)
            progress.num_bytes += result.num_bytes
            progress.seconds += result.seconds
            progress.pipe, progress.source = result.pipe_kind, lease.source.instance_id
            at += count
            if progress.num_blocks < at or (count < len(piece) and not lease.more):
                return

    async def put(
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
            source: Where they are.
            hashes: Names of the blocks, at most ``blocks_per_call``, of one chain or several.
            block_ids: Parallel to ``hashes``.
            generations: Parallel to ``hashes``; a block that changes meanwhile is not stored.
            deadline: ``time.monotonic()`` seconds.
            tenant: Whose blocks these are; ``None``: none.
            ready: The source's progress before it computes them; ``None``: they are complete.

        Returns:
            Per block whether the store holds it now, and bytes that moved.

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
        response = await self._calls.begin("Put", request, _left(deadline))
        if len(response.stored) != len(hashes):
            raise TransferError(f"the store answered of {len(response.stored)} blocks for {len(hashes)}")
        return list(response.stored), response.bytes

    async def contains(self, hashes: Sequence[BlockHash], *, tenant: Tenant | None = None) -> int:
        """Return how many leading blocks of a chain the store holds, which it begins to bring to memory.

        Args:
            hashes: At most ``blocks_per_call``.
            tenant: Whose blocks these are; ``None``: none.

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
        """Have the store keep the longest prefix of some blocks; ``None``: it has not even the first.

        Args:
            hashes: At most ``blocks_per_call``.
            deadline: ``time.monotonic()`` seconds, until which the lease lasts; the answer comes sooner.
            tenant: Whose blocks these are; ``None``: none.
            traceparent: W3C trace context of the request that loads them; empty: it is not traced.

        Raises:
            BatonError: The store refused or was not reached.
        """
        left = _left(deadline)
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
            self._give_back(answer.lease_id)
            raise

    async def fetch(
        self, lease: StoreLease, block_ids: Sequence[BlockId], *, deadline: float, cancelled: threading.Event
    ) -> FetchResult:
        """Copy the first blocks of a lease.

        Args:
            lease: Not given back yet.
            block_ids: Where to; as many as are wanted.
            deadline: ``time.monotonic()`` seconds.
            cancelled: Ends the fetch.

        Raises:
            BatonError: Nothing of it may be used.
        """
        count = len(block_ids)
        blocks = SequenceBlocks.pairs(
            lease.block_ids[:count], lease.generations[:count], np.asarray(block_ids, np.int64)
        )
        return await self._fetcher.fetch_async(lease.source, blocks, deadline=deadline, cancelled=cancelled)

    def release(self, lease: StoreLease) -> None:
        """Give a lease back in the background: no caller waits for it, and the next call may take it along."""
        self._give_back(lease.lease_id)

    async def ping(self) -> None:
        """Ask for a sign of life.

        Raises:
            BatonError: None came in time.
        """
        await self._calls.begin("GetStoreInfo", kvstore_pb2.GetStoreInfoRequest(), self._call_timeout_s)

    async def close(self) -> None:
        """Close the connection; leases not given back yet run out by themselves."""
        for call in self._forgone:
            call.cancel()
        if self._forgone:
            await asyncio.wait(self._forgone)
        await self._calls.close()

    def _forgo(self, call: asyncio.Future[Any]) -> None:
        """Give the lease back that a call may still bring, though no load waits for it."""

        def ended(call: asyncio.Future[Any]) -> None:
            self._forgone.discard(call)
            if not call.cancelled() and call.exception() is None and call.result().lease_id:
                self._give_back(call.result().lease_id)

        self._forgone.add(call)
        call.add_done_callback(ended)

    def _give_back(self, lease_id: int) -> None:
        self._calls.post("Release", kvstore_pb2.ReleaseRequest(lease_id=lease_id), _LATE_S)

    def _source_of(self, message: common_pb2.KvSource) -> BlockSource:
        data = message.SerializeToString()
        if self._source is None or self._source[0] != data:
            self._source = data, source_from_pb(message)
        return self._source[1]


def leading(valid: npt.NDArray[np.bool_]) -> int:
    """Return how many leading entries are true."""
    return len(valid) if valid.all() else int(valid.argmin())


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError("no time is left for the store")
    return left
