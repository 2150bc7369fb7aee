"""Prefill streams over gRPC, as the point-to-point connector wants them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from baton.api.v1 import worker_pb2, worker_pb2_grpc
from baton.errors import TransferError
from baton.kv_cache.connector import LoadRequest
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_transfer.connector.p2p.prefill_stream import Accepted, Finished, Offer, PrefillEvent
from baton.kv_transfer.connector.p2p.reuse import HeldBlocks
from baton.kv_transfer.protocol.source_pb import source_from_pb, source_to_pb
from baton.rpc.channel import open_channel
from baton.rpc.convert import fingerprint_to_pb, logprob_from_pb, sampling_to_pb, tenant_to_pb
from baton.rpc.errors import from_rpc_error
from baton.rpc.tls import Tls
from baton.token_ids import pack_ids
from baton.types import TokenLogprob

MAX_CHANNELS = 256


class GrpcPrefillDialer:
    """Opens Prefill streams and keeps a channel per address.

    Args:
        fingerprint: Of this instance's pool; the prefill instance compares it with its own.
        token: Shared token, if the services use one.
        tls: Certificates, if they use some.
    """

    def __init__(self, fingerprint: Fingerprint, token: str | None, tls: Tls | None = None) -> None:
        self._fingerprint = fingerprint_to_pb(fingerprint)
        self._token, self._tls = token, tls
        self._channels: dict[str, grpc.aio.Channel] = {}

    @asynccontextmanager
    async def open(
        self, address: str, request: LoadRequest, held: HeldBlocks, claim: str | None = None
    ) -> AsyncIterator[AsyncIterator[PrefillEvent]]:
        """Open a stream; leaving the context cancels it, which is how a lease is given back."""
        stub = worker_pb2_grpc.WorkerServiceStub(await self._channel(address))
        call = stub.Prefill(
            worker_pb2.PrefillRequest(
                # Unique per attempt: a stream that broke may not be gone yet where the next one arrives.
                request_id=f"{request.request_id}.{secrets.token_hex(4)}",
                prompt_token_ids=pack_ids(request.token_ids),
                num_output_tokens=request.num_output_tokens,
                sampling=sampling_to_pb(request.sampling),
                num_held_tokens=held.num_tokens,
                held=worker_pb2.HeldBlocks(
                    source=source_to_pb(held.source), block_ids=held.block_ids, generations=held.generations
                ),
                fingerprint=self._fingerprint,
                cache_salt=request.cache_salt,
                tenant=tenant_to_pb(request.tenant),
                priority=request.priority,
                claim=None if claim is None else worker_pb2.PrefillClaim(key=claim),
            )
        )
        try:
            yield _events(call)
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close every channel."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)

    async def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.pop(address, None) or open_channel(address, token=self._token, tls=self._tls)
        self._channels[address] = channel  # most recently used last
        if len(self._channels) > MAX_CHANNELS:
            oldest = next(iter(self._channels))
            await self._channels.pop(oldest).close(grace=60.0)
        return channel


async def _events(
    call: grpc.aio.UnaryStreamCall[worker_pb2.PrefillRequest, worker_pb2.PrefillResponse],
) -> AsyncIterator[PrefillEvent]:
    try:
        async for response in call:
            kind = response.WhichOneof("event")
            if kind == "accepted":
                yield Accepted(source_from_pb(response.accepted.source))
            elif kind == "offer":
                offer = response.offer
                ready = offer.ready if offer.HasField("ready") else None
                ids, generations = tuple(offer.block_ids), tuple(offer.generations)
                yield Offer(offer.first_block, ids, generations, offer.num_tokens, ready)
            elif kind == "result":
                result = response.result
                first = logprob_from_pb(result.logprob) if result.HasField("logprob") else None
                token = first or TokenLogprob(result.first_token_id, 0.0, 0)
                yield Finished(token, result.prefix_hit_tokens)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except grpc.aio.UsageError as error:  # the channel was closed under us
        raise TransferError(f"the prefill stream broke: {error}") from error
