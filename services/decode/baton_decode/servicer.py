"""A decode instance's own call: Generate."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from baton.api.v1 import common_pb2, worker_pb2
from baton.engine.request import EngineRequest, RequestMetrics, SequenceOutput
from baton.errors import BatonError, InternalError, PermissionDeniedError, UnavailableError
from baton.kv_cache.connector import PrefilledPrompt
from baton.kv_transfer.connector.p2p.consumer import P2PConsumer
from baton.rpc.convert import (
    finish_to_pb,
    logprob_to_pb,
    path_to_pb,
    prompt_logprobs_to_pb,
    sampling_from_pb,
    tenant_from_pb,
)
from baton.rpc.ticket import TicketCheck
from baton.token_ids import unpack_ids
from baton.types import FinishReason, PrefillPath, RequestId
from baton.worker.engine_thread import RequestStream
from baton.worker.servicer import WorkerContext, WorkerServicerBase, require_request


class DecodeServicer(WorkerServicerBase):
    """Owns each request from admission to its last token."""

    def __init__(self, context: WorkerContext, loader: P2PConsumer, tickets: TicketCheck | None = None) -> None:
        super().__init__(context)
        self._loader = loader
        self._tickets = tickets

    async def Generate(
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        """Run a request that came without a router between: it has a ticket where this instance has a key."""
        if self._tickets is not None:
            try:
                self._tickets.verify(request)
            except PermissionDeniedError as error:
                self._worker.metrics.requests.labels("generate", error.code).inc()
                raise
        async with aclosing(self._generate(request, context)) as responses:
            async for response in responses:
                yield response

    async def _generate(
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.GenerateResponse, None]:
        """Run a request and stream its tokens; one message per engine step."""
        worker = self._worker
        code = "cancelled"
        try:
            with worker.admission.admit():
                stream = await worker.engine.submit(_engine_request(request))
                try:
                    async for response in self._responses(request, stream):
                        yield response
                finally:
                    stream.close()
                    self._loader.forget(RequestId(request.request_id))
            code = "ok"
        except BatonError as error:
            code = error.code
            raise
        finally:
            worker.metrics.requests.labels("generate", code).inc()

    async def _responses(
        self, request: worker_pb2.GenerateRequest, stream: RequestStream
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        first = True
        async for outputs in stream.until_finished(request.sampling.n or 1):
            response = worker_pb2.GenerateResponse(deltas=[_delta(output) for output in outputs])
            for output in outputs:
                _raise_if_failed(output)
                if output.metrics is not None and output.index == 0:
                    response.trace.CopyFrom(self._trace(RequestId(request.request_id), output.metrics))
                if output.prompt_logprobs is not None:
                    response.prompt_logprobs.extend(prompt_logprobs_to_pb(output.prompt_logprobs))
            if first and response.HasField("trace"):
                self._worker.metrics.trace(response.trace)
                first = False
            yield response

    def _trace(self, request_id: RequestId, metrics: RequestMetrics) -> common_pb2.RequestTrace:
        transfer = metrics.transfer
        reason = transfer.local_reason
        if transfer.path is PrefillPath.LOCAL and not reason:
            reason = self._loader.local_reason(request_id) or "prompt_logprobs"
        return common_pb2.RequestTrace(
            path=path_to_pb(transfer.path),
            prefill_instance=transfer.source if transfer.path is PrefillPath.REMOTE else "",
            decode_instance=self._worker.instance_id,
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
            local_reason=reason if transfer.path is PrefillPath.LOCAL else "",
        )


def _engine_request(request: worker_pb2.GenerateRequest) -> EngineRequest:
    tokens = unpack_ids(request.prompt_token_ids).tolist()
    return EngineRequest(
        request_id=require_request(request.request_id, len(tokens)),
        prompt_token_ids=tokens,
        output_token_ids=list(request.output_token_ids),
        sampling=sampling_from_pb(request.sampling),
        cache_salt=request.cache_salt,
        priority=request.priority,
        tenant=tenant_from_pb(request.tenant),
        candidates=tuple(request.prefill_candidates),
        threshold=request.remote_prefill_threshold if request.HasField("remote_prefill_threshold") else None,
        prefilled=PrefilledPrompt(request.prefilled.address, request.prefilled.key)
        if request.HasField("prefilled")
        else None,
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


def _raise_if_failed(output: SequenceOutput) -> None:
    """End the stream with a status on an error or a foreign abort, so that the router can go on elsewhere."""
    if output.finish_reason is FinishReason.ERROR:
        raise InternalError(output.error or "the engine failed the request")
    if output.finish_reason is FinishReason.ABORT:
        raise UnavailableError("the request was aborted on this instance")
