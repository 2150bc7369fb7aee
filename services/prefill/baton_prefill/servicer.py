"""A prefill instance's own call: Prefill. The stream is the lease."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from baton.api.v1 import common_pb2, worker_pb2
from baton.engine.request import EngineRequest, SequenceOutput
from baton.errors import BatonError, DeadlineError, InternalError, InvalidRequestError, UnavailableError
from baton.hashing import as_token_array
from baton.kv_transfer.connector.p2p.prefill_stream import Offer
from baton.kv_transfer.connector.p2p.producer import Lease, P2POfferer
from baton.kv_transfer.connector.p2p.reuse import HeldBlocks, P2PReuser
from baton.kv_transfer.protocol.source_pb import source_from_pb, source_to_pb
from baton.rpc.convert import fingerprint_from_pb, logprob_to_pb, sampling_from_pb, tenant_from_pb
from baton.types import FinishReason
from baton.worker.engine_thread import RequestStream
from baton.worker.servicer import WorkerContext, WorkerServicerBase, require_request


class PrefillServicer(WorkerServicerBase):
    """Computes prompts and offers their KV."""

    def __init__(self, context: WorkerContext, offerer: P2POfferer, reuser: P2PReuser) -> None:
        super().__init__(context)
        self._offerer, self._reuser = offerer, reuser

    async def Prefill(
        self, request: worker_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        """Compute a prompt, offer its blocks as chunks finish, keep them until the caller closes the stream."""
        worker = self._worker
        code = "cancelled"
        try:
            with worker.admission.admit():
                engine_request = self._engine_request(request)
                tokens = as_token_array(request.prompt_token_ids)
                held = self._held(request)
                lease = self._offerer.open_lease(engine_request.request_id, tokens, request.num_held_tokens)
                worker.metrics.leases.set(self._offerer.num_leases())
                try:
                    if held is not None:
                        self._reuser.expect(engine_request.request_id, held)
                    stream = await worker.engine.submit(engine_request)
                    try:
                        async for response in self._responses(lease, stream):
                            if response.HasField("result"):
                                code = "ok"  # whoever has the result closes the stream: that is no cancellation
                            yield response
                    finally:
                        stream.close()
                finally:
                    self._reuser.forget(engine_request.request_id)
                    self._offerer.close_lease(lease)
                    worker.metrics.leases.set(self._offerer.num_leases())
        except BatonError as error:
            code = error.code
            raise
        finally:
            worker.metrics.requests.labels("prefill", code).inc()

    async def _responses(self, lease: Lease, stream: RequestStream) -> AsyncIterator[worker_pb2.PrefillResponse]:
        started = time.perf_counter()
        source = source_to_pb(self._worker.block_server.source)
        yield worker_pb2.PrefillResponse(accepted=worker_pb2.PrefillAccepted(source=source))
        output = asyncio.ensure_future(_first_output(stream))
        try:
            async for offer in self._offers_unless_failed(lease, output):
                yield worker_pb2.PrefillResponse(offer=_offer_to_pb(lease, offer))
            result = _result(await output)
        finally:
            output.cancel()
        compute_us = round(1e6 * (time.perf_counter() - started)) - result.queue_us
        result.compute_us = max(0, compute_us)
        yield worker_pb2.PrefillResponse(result=result)
        # The caller closes the stream when it has everything; a caller that neither does nor dies is cut off.
        await asyncio.sleep(self._worker.config.lease_s)
        raise DeadlineError(f"the lease ended after {self._worker.config.lease_s:g} s")

    async def _offers_unless_failed(self, lease: Lease, output: asyncio.Future[SequenceOutput]) -> AsyncIterator[Offer]:
        """Yield the lease's offers; stop with the request's own error if it fails before the last one."""
        offers = self._offerer.offers(lease)
        try:
            while True:
                offer: asyncio.Future[Offer | None] = asyncio.ensure_future(_next(offers))
                try:
                    waits: list[asyncio.Future[Any]] = [offer, output]
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    if not offer.done() and output.done():
                        _result(output.result())  # raises if the request failed; else its last offer is on the way
                    item = await offer
                finally:
                    offer.cancel()
                    # The generator cannot be closed while it still runs towards its cancellation.
                    await asyncio.gather(offer, return_exceptions=True)
                if item is None:
                    return
                yield item
        finally:
            await offers.aclose()

    def _engine_request(self, request: worker_pb2.PrefillRequest) -> EngineRequest:
        tokens = list(request.prompt_token_ids)
        request_id = require_request(request.request_id, len(tokens))
        mine, theirs = self._worker.executor.fingerprint, fingerprint_from_pb(request.fingerprint)
        mine.require_reader(theirs, who="decode instance")
        theirs.plan_from(mine)  # whether its shape can take these blocks
        if request.num_held_tokens >= len(tokens):
            raise InvalidRequestError("num_held_tokens must leave something to compute", field="num_held_tokens")
        if request.num_output_tokens >= len(tokens):
            raise InvalidRequestError("num_output_tokens must leave a prompt", field="num_output_tokens")
        num_prompt = len(tokens) - request.num_output_tokens
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=tokens[:num_prompt],
            output_token_ids=tokens[num_prompt:],
            sampling=sampling_from_pb(request.sampling).replace(n=1),
            prefill_only=True,
            cache_salt=request.cache_salt,
            priority=request.priority,
            tenant=tenant_from_pb(request.tenant),
        )

    def _held(self, request: worker_pb2.PrefillRequest) -> HeldBlocks | None:
        """Return the blocks that the caller holds; ``None``: there are none that this instance takes."""
        held = _held(request)
        return held if held is not None and self._worker.executor.fingerprint.takes(held.source.fingerprint) else None


def _held(request: worker_pb2.PrefillRequest) -> HeldBlocks | None:
    if not request.HasField("held") or not request.held.block_ids:
        return None
    held = HeldBlocks(
        source_from_pb(request.held.source, field="held.source"),
        tuple(request.held.block_ids),
        tuple(request.held.generations),
    )
    if len(held.generations) != len(held.block_ids) or held.num_tokens > request.num_held_tokens:
        raise InvalidRequestError("held must name the blocks of num_held_tokens tokens", field="held")
    return held


async def _next(offers: AsyncIterator[Offer]) -> Offer | None:
    return await anext(offers, None)


async def _first_output(stream: RequestStream) -> SequenceOutput:
    return (await stream.next())[0]


def _result(output: SequenceOutput) -> worker_pb2.PrefillResult:
    if output.finish_reason is FinishReason.ERROR:
        raise InternalError(output.error or "the engine failed the prefill")
    if output.finish_reason is FinishReason.ABORT or not output.token_ids:
        raise UnavailableError("the prefill was aborted")
    result = worker_pb2.PrefillResult(first_token_id=output.token_ids[0])
    if output.logprobs:
        result.logprob.CopyFrom(logprob_to_pb(output.logprobs[0]))
    if output.metrics is not None:
        result.queue_us = output.metrics.queue_us
        result.prefix_hit_tokens = output.metrics.cached_tokens
    return result


def _offer_to_pb(lease: Lease, offer: Offer) -> common_pb2.KvOffer:
    return common_pb2.KvOffer(
        lease_id=lease.lease_id,
        first_block=offer.first_block,
        block_ids=offer.block_ids,
        generations=offer.generations,
        num_tokens=offer.num_tokens,
        ready=offer.ready,
    )
