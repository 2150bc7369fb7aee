"""The prefill role: computes prompts and offers their KV. A Prefill stream is the lease of its blocks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

from baton.api.v1 import common_pb2, worker_pb2
from baton.background import keep_running
from baton.engine.request import EngineRequest, SequenceOutput
from baton.engine.sampler import SAMPLER_VERSION
from baton.errors import DeadlineError, InvalidRequestError, UnavailableError
from baton.hashing import as_token_array
from baton.kv_transfer.connector.multi import MultiConnector
from baton.kv_transfer.connector.p2p.prefill_stream import HeldBlocks, Offer
from baton.kv_transfer.connector.p2p.producer import Lease, P2PProducer, P2PReuser, UnclaimedPrompts
from baton.kv_transfer.lookup_buffer import LookupBuffer
from baton.kv_transfer.types import source_from_pb, source_to_pb
from baton.rpc.convert import fingerprint_from_pb, logprob_to_pb, sampling_from_pb, session_key_from_pb, tenant_from_pb
from baton.token_ids import unpack_ids
from baton.tracing import Span
from baton.types import RequestId, Role
from baton.worker.context import InstanceRole, WorkerContext, record_engine_times, require_request, require_success
from baton.worker.engine_thread import EngineThread, RequestStream

Prompts: TypeAlias = UnclaimedPrompts[worker_pb2.PrefillResult]

QUEUE_INTERVAL_S = 1.0
_LATEST_WEIGHT = 0.5
"""Weight of the latest measured speed against the average of earlier ones."""
_OFFER_BUFFER_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class QueueState:
    """State of the prefill queue.

    Attributes:
        ahead: By request, the number of tokens to compute until its prompt is done, and whether it is being computed.
        tokens_per_s: Prompt tokens computed per second.
    """

    ahead: dict[RequestId, tuple[int, bool]]
    tokens_per_s: float

    def response_for(self, request_id: RequestId) -> worker_pb2.PrefillResponse | None:
        """Return the progress message for a request; ``None``: its prompt is computed."""
        if request_id not in self.ahead:
            return None
        tokens_ahead, running = self.ahead[request_id]
        queue = worker_pb2.PrefillQueue(tokens_ahead=tokens_ahead, tokens_per_s=self.tokens_per_s, running=running)
        return worker_pb2.PrefillResponse(queue=queue)


class PrefillQueue:
    """Reports the queue's state to waiting callers, as long as the engine makes progress.

    Args:
        engine: The engine whose queue is read.
        interval_s: Seconds between two reports.
    """

    def __init__(self, engine: EngineThread, interval_s: float = QUEUE_INTERVAL_S) -> None:
        self._engine = engine
        self._interval_s = interval_s
        self._followers = 0
        self._next: asyncio.Future[QueueState] | None = None
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Keep reports coming from :meth:`next_state` while the context is open."""
        self._followers += 1
        if self._task is None:
            self._task = keep_running(self._run, "prefill queue")
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers:
                self._task.cancel()
                self._task = None

    def next_state(self) -> asyncio.Future[QueueState]:
        """Return a future of the next state that shows progress; it is shared, so do not cancel it."""
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    async def _run(self) -> None:
        core = self._engine.core
        speed = 0.0
        with contextlib.suppress(UnavailableError):  # the engine has stopped: its requests end
            computed, at = await self._engine.call(lambda: (core.num_prefilled, time.monotonic()))
            while True:
                await asyncio.sleep(self._interval_s)
                # In the engine's thread: an engine that hangs in a step reports nothing.
                ahead, now_computed, now = await self._engine.call(
                    lambda: (core.prompt_queue(), core.num_prefilled, time.monotonic())
                )
                if now_computed == computed:
                    continue
                latest = (now_computed - computed) / (now - at)
                speed = latest if not speed else (1 - _LATEST_WEIGHT) * speed + _LATEST_WEIGHT * latest
                computed = now_computed
                at = now
                if self._next is not None and not self._next.done():
                    self._next.set_result(QueueState(ahead, speed))


class PrefillRole(InstanceRole):
    """Computes prompts and offers their KV."""

    role = Role.PREFILL

    def __init__(self, context: WorkerContext) -> None:
        self._worker = context
        base = context.base
        config = base.config
        fingerprint = base.model.fingerprint
        block_size = base.engine_config.block_size
        # Recurrent states are complete at the end of a step: nothing could be done with the KV before.
        layerwise = config.layerwise and not base.model.state_blocks
        self._buffer: LookupBuffer[Offer] = LookupBuffer(max_bytes=_OFFER_BUFFER_BYTES)
        self._producer = producer = P2PProducer(
            arena=base.model.arena,
            buffer=self._buffer,
            wake=base.wake_engine,
            block_size=block_size,
            lease_s=config.lease_s,
            max_leases=config.max_leases,
            layers=len(fingerprint.layer_shapes) if layerwise else 0,
            state_blocks=base.model.state_blocks,
        )
        self._unclaimed: Prompts = UnclaimedPrompts(
            max_blocks=int(config.unclaimed_share * base.model.arena.num_blocks),
            block_bytes=fingerprint.block_bytes,
            block_size=block_size,
            lease_s=config.lease_s,
            close_lease=producer.close_lease,
        )
        producer.on_poll = self._unclaimed.drop_expired
        self._reuser = P2PReuser(
            fetcher=context.fetcher,
            loop=base.loop,
            wake=base.wake_engine,
            block_size=block_size,
            threshold=config.remote_prefill_threshold,
            timeout_s=config.prefill_stall_s,
        )
        self.connector = MultiConnector([self._reuser, producer])
        self._queue = PrefillQueue(context.engine)
        self.next_step = (lambda: producer.next_step) if layerwise else None

    async def prefill(self, request: worker_pb2.PrefillRequest) -> AsyncGenerator[worker_pb2.PrefillResponse, None]:
        """Offer a prompt's blocks, computed now or beforehand, and keep them until the caller closes the stream."""
        with self._worker.call("prefill", request.trace_context) as outcome:
            claimed = request.HasField("claim")
            responses = self._claimed(request) if claimed else self._computed(request, outcome.span)
            async with aclosing(responses):
                async for response in responses:
                    if response.HasField("result"):
                        outcome.code = (
                            "ok"  # a caller closes the stream once it has the result; that is no cancellation
                        )
                        _record_result(outcome.span, response.result)
                    yield response

    async def _computed(
        self, request: worker_pb2.PrefillRequest, span: Span
    ) -> AsyncGenerator[worker_pb2.PrefillResponse]:
        """Compute a prompt and offer its blocks as chunks finish."""
        worker = self._worker
        engine_request = await worker.constrain(self._engine_request(request, span))
        self._require_reader(request.fingerprint)
        tokens = as_token_array(unpack_ids(request.prompt_token_ids))
        if request.num_held_tokens >= len(tokens):
            raise InvalidRequestError("num_held_tokens must leave something to compute", field="num_held_tokens")
        held = self._readable_held_blocks(request)
        lease = self._producer.open_lease(engine_request.request_id, tokens, request.num_held_tokens)
        try:
            if held is not None:
                self._reuser.expect(engine_request.request_id, held)
            stream = await worker.engine.submit(engine_request)
            try:
                yield self._accepted_response()
                computation = _Computation(self._producer, lease, stream, span)
                with self._queue.follow():
                    async with aclosing(computation.offers(self._queue)) as offers:
                        async for offer in offers:
                            if isinstance(offer, Offer):
                                yield worker_pb2.PrefillResponse(offer=_offer_to_pb(lease, offer))
                            elif (queue := offer.response_for(engine_request.request_id)) is not None:
                                yield queue
                yield worker_pb2.PrefillResponse(result=await computation.result())
                await self._wait_for_reader()
            finally:
                stream.close()
        finally:
            self._reuser.forget(engine_request.request_id)
            self._producer.close_lease(lease)

    async def _claimed(self, request: worker_pb2.PrefillRequest) -> AsyncGenerator[worker_pb2.PrefillResponse]:
        """Offer the blocks of a prompt that PrefillFirst computed."""
        tokens = as_token_array(unpack_ids(request.prompt_token_ids))
        require_request(request.request_id, len(tokens))
        self._require_reader(request.fingerprint)
        if request.num_held_tokens > len(tokens):
            raise InvalidRequestError("num_held_tokens is more than the prompt has", field="num_held_tokens")
        prompt = await self._unclaimed.claim(
            request.claim.key,
            tokens,
            cache_salt=request.cache_salt,
            sampling=sampling_from_pb(request.sampling),
        )
        try:
            yield self._accepted_response()
            offer = prompt.offer_from(request.num_held_tokens // self._worker.base.engine_config.block_size)
            yield worker_pb2.PrefillResponse(offer=_offer_to_pb(prompt.lease, offer))
            yield worker_pb2.PrefillResponse(result=prompt.result)
            await self._wait_for_reader()
        finally:
            self._producer.close_lease(prompt.lease)

    async def prefill_first(self, request: worker_pb2.PrefillFirstRequest) -> worker_pb2.PrefillFirstResponse:
        with self._worker.call("prefill_first", request.trace_context) as call:
            engine_request = await self._worker.constrain(self._engine_request(request, call.span))
            tokens = as_token_array(unpack_ids(request.prompt_token_ids))
            self._unclaimed.require_room(len(tokens))
            lease = self._producer.open_lease(engine_request.request_id, tokens, 0, layerwise=False)
            try:
                response = await self._compute_unclaimed(engine_request, lease, call.span)
                _record_result(call.span, response.result)
                return response
            except BaseException:
                self._unclaimed.withdraw(lease.request_id)
                if not lease.claimed:
                    self._producer.close_lease(lease)
                raise

    async def _compute_unclaimed(
        self, request: EngineRequest, lease: Lease, span: Span
    ) -> worker_pb2.PrefillFirstResponse:
        engine = self._worker.engine
        stream = await engine.submit(request)
        try:
            computation = _Computation(self._producer, lease, stream, span)
            async with aclosing(computation.offers()) as offers:
                all_offers = [offer async for offer in offers if isinstance(offer, Offer)]
            result = await computation.result()
        except BaseException:
            stream.close()
            raise
        engine.forget(request.request_id, stream)  # closing the stream would release the blocks
        key = await self._unclaimed.add_prompt(
            lease, all_offers, result, cache_salt=request.cache_salt, sampling=request.sampling
        )
        return worker_pb2.PrefillFirstResponse(key=key, lease_ms=round(1e3 * self._unclaimed.lease_s), result=result)

    def withdraw(self, request_id: RequestId) -> bool:
        return self._unclaimed.withdraw(request_id)

    def num_kept(self) -> int:
        return self._producer.num_leases()

    async def close(self) -> None:
        """Drop the offers; the leases were closed with the connector."""
        self._unclaimed.close()
        self._buffer.close()

    def _accepted_response(self) -> worker_pb2.PrefillResponse:
        source = source_to_pb(self._worker.block_server.source)
        return worker_pb2.PrefillResponse(accepted=worker_pb2.PrefillAccepted(source=source))

    async def _wait_for_reader(self) -> None:
        """Wait until the caller has fetched the blocks and closes the stream, which cancels this call.

        Raises:
            DeadlineError: The caller did not close the stream within the lease.
        """
        lease_s = self._worker.base.config.lease_s
        await asyncio.sleep(lease_s)
        raise DeadlineError(f"the lease ended after {lease_s:g} s")

    def _require_reader(self, fingerprint: common_pb2.Fingerprint) -> None:
        """Refuse a caller whose pool cannot hold blocks of this instance.

        Raises:
            FingerprintMismatchError: Names the field that differs.
        """
        own = self._worker.base.model.fingerprint
        reader = fingerprint_from_pb(fingerprint)
        own.require_reader(reader, who="decode instance")
        reader.plan_from(own)  # raises if the reader's shape cannot hold these blocks

    def _engine_request(
        self, request: worker_pb2.PrefillRequest | worker_pb2.PrefillFirstRequest, span: Span
    ) -> EngineRequest:
        tokens = unpack_ids(request.prompt_token_ids).tolist()
        request_id = require_request(request.request_id, len(tokens))
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
            session_key=session_key_from_pb(request.session_key),
            retention_s=request.retention_s,
            traceparent=span.traceparent,
        )

    def _readable_held_blocks(self, request: worker_pb2.PrefillRequest) -> HeldBlocks | None:
        """Return the blocks that the caller holds and this instance can read; ``None``: there are none."""
        if not request.HasField("held") or not request.held.block_ids:
            return None
        if self._worker.base.model.state_blocks:
            return None  # without the recurrent states behind them they are of no use
        held = HeldBlocks(
            source_from_pb(request.held.source, field="held.source"),
            tuple(request.held.block_ids),
            tuple(request.held.generations),
        )
        if len(held.generations) != len(held.block_ids) or held.num_tokens > request.num_held_tokens:
            raise InvalidRequestError("held must name the blocks of num_held_tokens tokens", field="held")
        return held if self._worker.base.model.fingerprint.takes(held.source.fingerprint) else None


class _Computation:
    """A prompt that is being computed.

    Args:
        producer: Offers the prompt's blocks.
        lease: Lease that keeps the blocks.
        stream: Outputs of the engine for the request.
        span: Span of the call, which gets the engine's times.
    """

    def __init__(self, producer: P2PProducer, lease: Lease, stream: RequestStream, span: Span) -> None:
        self._producer = producer
        self._lease = lease
        self._span = span
        self._started = time.perf_counter()
        self._output = asyncio.ensure_future(_first_output(stream))

    async def offers(self, queue: PrefillQueue | None = None) -> AsyncGenerator[Offer | QueueState]:
        """Yield the lease's offers; raises the request's error if it fails before the last offer.

        Args:
            queue: Queue whose states are yielded between the offers.
        """
        offers = self._producer.offers(self._lease)
        output = self._output
        try:
            while True:
                offer: asyncio.Future[Offer | None] = asyncio.ensure_future(_next(offers))
                try:
                    waits: list[asyncio.Future[Any]] = [offer, output]
                    if queue is not None:
                        waits.append(queue.next_state())
                    while not (offer.done() or output.done()):
                        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                        if queue is not None and waits[-1].done():
                            yield waits[-1].result()
                            waits[-1] = queue.next_state()
                    if not offer.done():
                        _result_to_pb(output.result())  # raises if the request failed; else its last offer follows
                    item = await offer
                finally:
                    offer.cancel()
                    # The generator cannot be closed while it still runs towards its cancellation.
                    await asyncio.gather(offer, return_exceptions=True)
                if item is None:
                    return
                yield item
        except BaseException:
            output.cancel()
            raise
        finally:
            await offers.aclose()

    async def result(self) -> worker_pb2.PrefillResult:
        """Wait for the first token; call it after the last offer."""
        output = await self._output
        result = _result_to_pb(output)
        if self._span.recording and output.metrics is not None:
            record_engine_times(self._span, output.metrics)
        result.compute_us = max(0, round(1e6 * (time.perf_counter() - self._started)) - result.queue_us)
        return result


def _record_result(span: Span, result: worker_pb2.PrefillResult) -> None:
    if span.recording:
        span.event("computed")  # the rest of the span is the time that the blocks are kept for their reader
        for name in ("queue_us", "compute_us", "prefix_hit_tokens"):
            span.attributes[f"baton.{name}"] = getattr(result, name)


async def _next(offers: AsyncIterator[Offer]) -> Offer | None:
    return await anext(offers, None)


async def _first_output(stream: RequestStream) -> SequenceOutput:
    return (await stream.next())[0]


def _result_to_pb(output: SequenceOutput) -> worker_pb2.PrefillResult:
    require_success(output)
    if not output.token_ids:
        raise UnavailableError("the prefill was aborted")
    result = worker_pb2.PrefillResult(first_token_id=output.token_ids[0], sampler=SAMPLER_VERSION)
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
