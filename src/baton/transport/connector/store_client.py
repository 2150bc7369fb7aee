"""The KV store as its clients see it: calls over gRPC, bytes over pipes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np

from baton.api.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.errors import DeadlineError, TransferError
from baton.kv.fingerprint import Fingerprint
from baton.rpc.channel import open_channel
from baton.rpc.convert import fingerprint_to_pb
from baton.rpc.errors import from_rpc_error
from baton.transport.blocks import BlockFetcher, BlockSource, SequenceBlocks
from baton.transport.connector.source_pb import source_from_pb, source_to_pb
from baton.types import BlockHash, BlockId

log = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 2.0
_LEASE_MARGIN_S = 1.0


@dataclass
class LoadProgress:
    """What a load has brought so far; true also when the load fails."""

    num_blocks: int = 0
    """Leading blocks that are valid."""
    num_bytes: int = 0
    seconds: float = 0.0
    """Time in fetches."""
    pipe: str = ""
    source: str = ""


class StoreClient:
    """Speaks to one store. All methods run in one event loop; the connection is made with the first call.

    Args:
        address: ``host:port`` of the store.
        fingerprint: Of this instance's pool.
        fetcher: Copies blocks into this instance's pool.
        token: Shared token, if the services use one.
        call_timeout_s: Seconds that the store has for an answer that moves no bytes.
        blocks_per_call: Blocks in one call; longer chains take several.
    """

    def __init__(
        self,
        address: str,
        *,
        fingerprint: Fingerprint,
        fetcher: BlockFetcher,
        token: str | None,
        call_timeout_s: float,
        blocks_per_call: int,
    ) -> None:
        self._address, self._token = address, token
        self._fingerprint = fingerprint_to_pb(fingerprint)
        self._fetcher = fetcher
        self._call_timeout_s, self._blocks_per_call = call_timeout_s, blocks_per_call
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._releases: set[asyncio.Task[None]] = set()

    async def save(
        self,
        source: BlockSource,
        hashes: Sequence[BlockHash],
        block_ids: Sequence[BlockId],
        generations: Sequence[int],
        *,
        deadline: float,
    ) -> tuple[int, int]:
        """Let the store pull blocks; those it has are not moved.

        Args:
            source: This instance's pool.
            hashes: Names of the blocks, at most ``blocks_per_call``.
            block_ids: Parallel to ``hashes``.
            generations: Parallel to ``hashes``; a block that changes meanwhile is not stored.
            deadline: ``time.monotonic()`` seconds.

        Returns:
            Blocks that the store holds now, and bytes that moved.

        Raises:
            BatonError: The store refused or was not reached.
        """
        request = kvstore_pb2.PutRequest(
            fingerprint=self._fingerprint,
            block_hashes=hashes,
            source=source_to_pb(source),
            block_ids=block_ids,
            generations=generations,
        )
        response = await self._call("Put", request, _left(deadline))
        return sum(response.stored), response.bytes

    async def load(
        self,
        hashes: Sequence[BlockHash],
        block_ids: Sequence[BlockId],
        progress: LoadProgress,
        *,
        deadline: float,
        cancelled: threading.Event,
    ) -> None:
        """Copy the longest prefix of a chain that the store holds. On return nobody writes into the blocks any more.

        Args:
            hashes: The chain.
            block_ids: Blocks to fill, parallel to ``hashes``.
            progress: Filled as blocks come, also if the call then fails.
            deadline: ``time.monotonic()`` seconds.
            cancelled: Ends a fetch.

        Raises:
            BatonError: It fell short for another reason than that the store does not hold more.
        """
        at = 0
        while at < len(hashes):
            piece = hashes[at : at + self._blocks_per_call]
            lease_ms = round(1000 * (_left(deadline) + _LEASE_MARGIN_S))
            request = kvstore_pb2.GetRequest(fingerprint=self._fingerprint, block_hashes=piece, lease_ms=lease_ms)
            answer = await self._call("Get", request, min(self._call_timeout_s, _left(deadline)))
            if not answer.lease_id:
                return
            count = len(answer.block_ids)
            try:
                if not 0 < count <= len(piece) or len(answer.generations) != count:
                    raise TransferError(f"the store answered with {count} blocks of {len(piece)}")
                await self._fetch(answer, block_ids[at : at + count], progress, deadline, cancelled)
            finally:
                self._release(answer.lease_id)
            at += count
            if progress.num_blocks < at or (count < len(piece) and not answer.more):
                return

    async def close(self) -> None:
        """Close the connection; leases not given back yet run out by themselves."""
        for task in self._releases:
            task.cancel()
        if self._releases:
            await asyncio.wait(self._releases)
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = None

    async def _fetch(
        self,
        answer: kvstore_pb2.GetResponse,
        block_ids: Sequence[BlockId],
        progress: LoadProgress,
        deadline: float,
        cancelled: threading.Event,
    ) -> None:
        source = source_from_pb(answer.source)
        blocks = SequenceBlocks.pairs(
            np.fromiter(answer.block_ids, np.int64),
            np.fromiter(answer.generations, np.uint64),
            np.asarray(block_ids, np.int64),
        )
        result = await self._fetcher.fetch_async(source, blocks, deadline=deadline, cancelled=cancelled)
        progress.num_blocks += len(result.valid) if result.valid.all() else int(result.valid.argmin())
        progress.num_bytes += result.num_bytes
        progress.seconds += result.seconds
        progress.pipe, progress.source = result.pipe_kind, source.instance_id

    def _release(self, lease_id: int) -> None:
        """Give a lease back in the background: nobody needs to wait for it."""

        async def release() -> None:
            request = kvstore_pb2.ReleaseRequest(lease_id=lease_id)
            try:
                await self._stub.Release(request, timeout=_RELEASE_TIMEOUT_S)
            except grpc.RpcError as error:
                log.info("lease %d was not given back and runs out by itself: %s", lease_id, error.code().name)

        task = asyncio.get_running_loop().create_task(release(), name="release lease")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _call(self, name: str, request: Any, timeout: float) -> Any:
        if self._channel is None:
            self._channel = open_channel(self._address, token=self._token)
            self._stub = kvstore_pb2_grpc.KvStoreServiceStub(self._channel)
        try:
            return await getattr(self._stub, name)(request, timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except grpc.aio.UsageError as error:  # the channel was closed under us
            raise TransferError(f"the connection to the store was closed: {error}") from error


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError("no time is left for the store")
    return left
