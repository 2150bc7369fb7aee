"""The decode role: owns each request from admission to its last token, and fetches KV from prefill instances."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from baton.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.engine.request import EngineRequest, RequestMetrics, SequenceOutput
from baton.engine.sampler import SAMPLER_VERSION
from baton.errors import BatonError, TransferError
from baton.kv_cache.connector import LoadRequest, PrefilledPrompt
from baton.kv_transfer.connector.p2p.consumer import OwnPool, P2PConsumer
from baton.kv_transfer.connector.p2p.prefill_stream import (
    Accepted,
    Acknowledged,
    Finished,
    HeldBlocks,
    Offer,
    PrefillEvent,
    Queued,
)
from baton.kv_transfer.types import source_from_pb, source_to_pb
from baton.rpc.channel import open_channel
from baton.rpc.convert import (
    fingerprint_to_pb,
    finish_to_pb,
    logprob_from_pb,
    logprob_to_pb,
    path_to_pb,
    prompt_logprobs_to_pb,
    sampling_from_pb,
    sampling_to_pb,
    session_key_from_pb,
    tenant_from_pb,
    tenant_to_pb,
    trace_attributes,
)
from baton.rpc.errors import from_rpc_error, readable
from baton.token_ids import pack_ids, unpack_ids
from baton.tracing import Span, continue_span
from baton.types import PrefillPath, RequestId, Role, TokenLogprob
from baton.worker.context import (
    InstanceContext,
    InstanceRole,
    WorkerContext,
    record_engine_times,
    require_request,
    require_success,
)
from baton.worker.engine_thread import RequestStream

_MAX_CHANNELS = 256


class DecodeRole(InstanceRole):
    """Runs requests; fetches their KV from prefill instances where that is faster than computing it."""

    role = Role.DECODE
    connector: P2PConsumer

    def __init__(self, context: WorkerContext) -> None:
        self._worker = context
        base = context.base
        config = base.config
        self._dialer = _PrefillDialer(base)
        self.connector = P2PConsumer(
            pool=OwnPool(
                context.fetcher,
                base.model.arena,
                base.engine_config.block_size,
                base.get_source,
                base.model.executor.layout.num_groups,
                base.model.state_blocks,
            ),
            dialer=self._dialer,
            loop=base.loop,
            wake=base.wake_engine,
            threshold=config.remote_prefill_threshold,
            stall_s=config.prefill_stall_s,
            wait_s=config.prefill_wait_s,
        )

    def set_silent_prefills(self, router: object, addresses: frozenset[str]) -> None:
        """Set the prefill instances that do not answer a router; requests that wait for them go on elsewhere."""
        self.connector.watch.set_silent(router, addresses)

    def unreadable_prefills(self) -> list[str]:
        """Return the prefill instances over whose pipes nothing came lately."""
        return self.connector.unreadable()

    async def close(self) -> None:
        """Close the connections to prefill instances."""
        await self._dialer.close()

    async def generate(self, request: worker_pb2.GenerateRequest) -> AsyncGenerator[worker_pb2.GenerateResponse, None]:
        """Run a request and stream its tokens; one message per engine step."""
        with self._worker.call("generate", request.trace_context) as call:
            try:
                engine_request = await self._worker.constrain(_engine_request(request, call.span.traceparent))
                stream = await self._worker.engine.submit(engine_request)
                try:
                    async for response in self._responses(request, stream, call.span):
                        yield response
                finally:
                    stream.close()
                    self.connector.forget(RequestId(request.request_id))
            finally:
                self._worker.base.events.flush_request()

    async def _responses(
        self, request: worker_pb2.GenerateRequest, stream: RequestStream, span: Span
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        first = True
        metrics: RequestMetrics | None = None
        try:
            async for outputs in stream.until_finished(request.sampling.n or 1):
                response = worker_pb2.GenerateResponse(deltas=[_delta(output) for output in outputs])
                for output in outputs:
                    if output.metrics is not None and output.index == 0:
                        metrics = output.metrics
                        response.trace.CopyFrom(self._trace(RequestId(request.request_id), metrics))
                    require_success(output)
                    if output.prompt_logprobs is not None:
                        response.prompt_logprobs.extend(prompt_logprobs_to_pb(output.prompt_logprobs))
                if first and response.HasField("trace"):
                    self._worker.base.metrics.count_trace(response.trace)
                    first = False
                yield response
        finally:
            if span.recording and metrics is not None:
                span.attributes.update(trace_attributes(self._trace(RequestId(request.request_id), metrics)))
                record_engine_times(span, metrics)

    def _trace(self, request_id: RequestId, metrics: RequestMetrics) -> common_pb2.RequestTrace:
        transfer = metrics.transfer
        reason = transfer.local_reason
        if transfer.path is PrefillPath.LOCAL and not reason:
            reason = self.connector.local_reason(request_id) or "prompt_logprobs"
        return common_pb2.RequestTrace(
            path=path_to_pb(transfer.path),
            prefill_instance=transfer.source if transfer.path is PrefillPath.REMOTE else "",
            decode_instance=self._worker.base.instance_id,
            pipe=transfer.pipe,
            pipe_fallback=transfer.pipe_fallback,
            kv_bytes=transfer.kv_bytes,
            transfer_us=transfer.transfer_us,
            exposed_us=transfer.exposed_us,
            prompt_tokens=metrics.prompt_tokens,
            cached_tokens=metrics.cached_tokens,
            transferred_tokens=metrics.transferred_tokens,
            recomputed_tokens=metrics.computed_tokens,
            prefill_cached_tokens=transfer.source_cached_tokens,
            queue_us=metrics.queue_us,
            ttft_us=metrics.ttft_us,
            failed_prefills=transfer.failures,
            num_preemptions=metrics.num_preemptions,
            reloaded_tokens=metrics.reloaded_tokens,
            repeated_tokens=metrics.repeated_tokens,
            drafted_tokens=metrics.drafted_tokens,
            accepted_tokens=metrics.accepted_tokens,
            local_reason=reason if transfer.path is PrefillPath.LOCAL else "",
        )


def _engine_request(request: worker_pb2.GenerateRequest, traceparent: str) -> EngineRequest:
    tokens = unpack_ids(request.prompt_token_ids).tolist()
    return EngineRequest(
        request_id=require_request(request.request_id, len(tokens)),
        prompt_token_ids=tokens,
        output_token_ids=list(request.output_token_ids),
        sampling=sampling_from_pb(request.sampling),
        cache_salt=request.cache_salt,
        priority=request.priority,
        tenant=tenant_from_pb(request.tenant),
        session_key=session_key_from_pb(request.session_key),
        retention_s=request.retention_s,
        candidates=tuple(request.prefill_candidates),
        threshold=request.remote_prefill_threshold if request.HasField("remote_prefill_threshold") else None,
        prefilled=PrefilledPrompt(request.prefilled.address, request.prefilled.key)
        if request.HasField("prefilled")
        else None,
        traceparent=traceparent,
    )


def _delta(output: SequenceOutput) -> worker_pb2.SequenceDelta:
    delta = worker_pb2.SequenceDelta(
        index=output.index, token_ids=output.token_ids, finish_reason=finish_to_pb(output.finish_reason)
    )
    if output.logprobs is not None:
        delta.logprobs.extend(logprob_to_pb(item) for item in output.logprobs)
    if output.stop_token_id is not None:
        delta.stop_token_id = output.stop_token_id
    if output.error is not None:
        delta.error = output.error
    return delta


class _PrefillDialer:
    """Opens Prefill streams, over one channel per address.

    Args:
        context: This instance's parts.
    """

    def __init__(self, context: InstanceContext) -> None:
        self._fingerprint = fingerprint_to_pb(context.model.fingerprint)
        self._token = context.token
        self._tls = context.tls
        self._spans = context.spans
        self._channels: dict[str, grpc.aio.Channel] = {}

    @asynccontextmanager
    async def open(
        self, address: str, request: LoadRequest, held: HeldBlocks, claim: str | None = None
    ) -> AsyncIterator[AsyncIterator[PrefillEvent]]:
        """Open a stream; leaving the context cancels it, which releases the lease."""
        stub = worker_pb2_grpc.WorkerServiceStub(await self._channel(address))
        span = continue_span("remote_prefill", request.traceparent, self._spans, kind="client")
        if span.recording:
            span.attributes["server.address"] = address
        call = stub.Prefill(
            worker_pb2.PrefillRequest(
                # Unique per attempt: the prefill instance may not have noticed yet that the last stream broke.
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
                session_key=request.session_key,
                retention_s=request.retention_s,
                priority=request.priority,
                trace_context={"traceparent": span.traceparent} if span.traceparent else None,
                claim=None if claim is None else worker_pb2.PrefillClaim(key=claim),
            )
        )
        status = "ok"
        try:
            yield _events(call)
        except BaseException as error:
            status = error.code if isinstance(error, BatonError) else "cancelled"
            raise
        finally:
            call.cancel()
            span.end(status)

    async def close(self) -> None:
        channels = self._channels
        self._channels = {}
        for channel in channels.values():
            await channel.close(None)

    async def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.pop(address, None) or open_channel(address, token=self._token, tls=self._tls)
        self._channels[address] = channel  # most recently used last
        if len(self._channels) > _MAX_CHANNELS:
            oldest = next(iter(self._channels))
            await self._channels.pop(oldest).close(grace=60.0)
        return channel


async def _events(
    call: grpc.aio.UnaryStreamCall[worker_pb2.PrefillRequest, worker_pb2.PrefillResponse],
) -> AsyncIterator[PrefillEvent]:
    try:
        # Shielded: with interceptors, gRPC would treat a cancellation here as one of its own task, and continue.
        await asyncio.shield(asyncio.ensure_future(call.initial_metadata()))
        yield Acknowledged()
        async for response in call:
            kind = readable(response).WhichOneof("event")
            if kind == "accepted":
                yield Accepted(source_from_pb(response.accepted.source))
            elif kind == "offer":
                offer = response.offer
                ready = offer.ready if offer.HasField("ready") else None
                yield Offer(
                    offer.first_block, tuple(offer.block_ids), tuple(offer.generations), offer.num_tokens, ready
                )
            elif kind == "queue":
                queue = response.queue
                yield Queued(queue.tokens_ahead, queue.tokens_per_s, queue.running)
            elif kind == "result":
                result = response.result
                first = logprob_from_pb(result.logprob) if result.HasField("logprob") else None
                token = first or TokenLogprob(result.first_token_id, 0.0, 0)
                # Another sampler version may have drawn differently: the token is sampled here instead.
                same = result.sampler in ("", SAMPLER_VERSION)
                yield Finished(token if same else None, result.prefix_hit_tokens)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except grpc.aio.UsageError as error:  # the channel was closed under us
        raise TransferError(f"the prefill stream broke: {error}") from error
