"""The calls that prefill and decode instances answer alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from baton.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.config import EngineConfig
from baton.config.stores import DISCOVER, StoreAddress
from baton.config.worker import WorkerConfig
from baton.engine.executor.base import Executor
from baton.engine.request import EngineStats
from baton.errors import InvalidRequestError
from baton.kv_cache.arena import Arena
from baton.kv_cache.events import KVEvent
from baton.kv_cache.shards import KVShards
from baton.kv_transfer.blocks import BlockServer
from baton.rpc.convert import fingerprint_to_pb, role_to_pb
from baton.rpc.multiplex import generate_many
from baton.types import InstanceId, RequestId, Role
from baton.version import __version__
from baton.worker.admission import Admission
from baton.worker.engine_thread import EngineThread
from baton.worker.events import KvEventLog
from baton.worker.metrics import WorkerMetrics
from baton.worker.tiers import TierBoard

MAX_PROMPT_TOKENS_PER_CALL = 4_000_000


@dataclass(frozen=True)
class WorkerContext:
    """The parts of a running instance that its calls use."""

    role: Role
    instance_id: InstanceId
    config: WorkerConfig
    engine_config: EngineConfig
    executor: Executor
    engine: EngineThread
    shards: KVShards
    arena: Arena
    block_server: BlockServer
    events: KvEventLog
    tiers: TierBoard
    admission: Admission
    metrics: WorkerMetrics
    tokenizer_digest: str


class WorkerServicerBase(worker_pb2_grpc.WorkerServiceServicer):
    """Everything but Generate and Prefill."""

    def __init__(self, context: WorkerContext) -> None:
        self._worker = context
        self._rates = _Rates()

    async def Generate(
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        """Refuse what only a decode instance does."""
        self._refuse("generate")
        yield worker_pb2.GenerateResponse()  # never reached: makes this a stream

    async def _generate(
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        """Run one request of a router."""
        async for response in self.Generate(request, context):
            yield response

    async def GenerateMany(
        self, requests: AsyncIterator[worker_pb2.GenerateManyRequest], context: Any
    ) -> AsyncIterator[worker_pb2.GenerateManyResponse]:
        """Generate for many requests on one stream, which routers open: what runs on it needs no ticket."""
        async with aclosing(generate_many(self._generate, requests, context)) as messages:
            async for message in messages:
                yield message

    async def Prefill(
        self, request: worker_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        """Refuse what only a prefill instance does."""
        self._refuse("prefill for others")
        yield worker_pb2.PrefillResponse()  # never reached: makes this a stream

    async def PrefillFirst(
        self, request: worker_pb2.PrefillFirstRequest, context: Any
    ) -> worker_pb2.PrefillFirstResponse:
        """Refuse what only a prefill instance does."""
        self._refuse("prefill for others")
        return worker_pb2.PrefillFirstResponse()  # never reached

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:
        """End a request."""
        engine = self._worker.engine
        found = await engine.call(lambda: engine.core.abort(RequestId(request.request_id)))
        return worker_pb2.AbortResponse(found=found)

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Any) -> worker_pb2.GetInfoResponse:
        """Tell who this is."""
        worker = self._worker
        return worker_pb2.GetInfoResponse(
            instance_id=worker.instance_id,
            role=role_to_pb(worker.role),
            epoch=worker.arena.epoch,
            fingerprint=fingerprint_to_pb(worker.executor.fingerprint),
            num_blocks=worker.arena.num_blocks,
            max_model_len=worker.engine.core.max_model_len,
            max_num_seqs=worker.engine_config.max_num_seqs,
            endpoints=[common_pb2.KvEndpoint(kind=e.kind, address=e.address) for e in worker.block_server.endpoints],
            served_model_name=worker.engine_config.model_name,
            version=__version__,
            attention_backend=worker.executor.attention_backend,
            device=worker.engine_config.device,
            eos_token_ids=sorted(worker.executor.eos_token_ids),
            vocab_size=worker.executor.vocab_size,
            model_path=worker.engine_config.model,
            tokenizer_digest=worker.tokenizer_digest,
            kvstore=_store_nodes(worker.config.kvstore),
        )

    async def StreamKvEvents(
        self, request: worker_pb2.StreamKvEventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.StreamKvEventsResponse]:
        """Follow the prefix cache."""
        if not self._worker.config.kv_events:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this instance was started with --no-kv-events")
        batches = self._worker.events.follow(
            request.from_sequence, request.epoch, self._snapshot, heartbeat_s=request.heartbeat_ms / 1000
        )
        async for batch in batches:
            yield worker_pb2.StreamKvEventsResponse(batch=batch)

    async def StreamLoad(
        self, request: worker_pb2.StreamLoadRequest, context: Any
    ) -> AsyncIterator[worker_pb2.StreamLoadResponse]:
        """Report the load, at once and then whenever it changed."""
        interval_s = (request.interval_ms or self._worker.config.load_interval_ms) / 1000
        last: common_pb2.LoadReport | None = None
        while True:
            report = self._load_report()
            if report != last:
                yield worker_pb2.StreamLoadResponse(load=report)
                last = report
            await asyncio.sleep(interval_s)

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
        """Stop admission and wait for running requests."""
        left = await self._worker.admission.drain(request.timeout_ms / 1000)
        return worker_pb2.DrainResponse(num_unfinished=left)

    def _refuse(self, what: str) -> None:
        raise InvalidRequestError(f"this is a {self._worker.role} instance: it does not {what}", field="role")

    async def _snapshot(self) -> tuple[int, list[KVEvent]]:
        engine, log = self._worker.engine, self._worker.events
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[int, list[KVEvent]]] = loop.create_future()

        def give(events: list[KVEvent]) -> None:
            if not done.done():
                done.set_result((log.sequence, [*events, *self._worker.tiers.snapshot()]))

        def take() -> None:
            # Events of earlier steps reach the log through the same queue of callbacks, so they are counted
            # by the time this one runs: the sequence number fits the snapshot exactly.
            events: list[KVEvent] = list(engine.core.snapshot())
            loop.call_soon_threadsafe(give, events)

        await engine.call(take)
        return await done

    def _load_report(self) -> common_pb2.LoadReport:
        stats = self._worker.engine.stats
        prefill_rate, decode_rate = self._rates.update(stats)
        return common_pb2.LoadReport(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_loading=stats.num_loading,
            blocks_total=stats.blocks_total,
            blocks_active=stats.blocks_active,
            blocks_cached=stats.blocks_cached,
            waiting_prompt_tokens=stats.waiting_prompt_tokens,
            prefill_tokens_per_s=prefill_rate,
            decode_tokens_per_s=decode_rate,
            num_preemptions=stats.num_preemptions,
            draining=self._worker.admission.draining,
        )


def require_request(request_id: str, num_tokens: int) -> RequestId:
    """Check what every call with a request carries.

    Raises:
        InvalidRequestError: The id is missing or too long, or there are no tokens.
    """
    if not 1 <= len(request_id) <= 256:
        raise InvalidRequestError("request_id must have 1 to 256 characters", field="request_id")
    if not 1 <= num_tokens <= MAX_PROMPT_TOKENS_PER_CALL:
        raise InvalidRequestError("prompt_token_ids must not be empty", field="prompt_token_ids")
    return RequestId(request_id)


def _store_nodes(kvstore: str) -> str:
    """Return what routers are told of ``--kvstore``: its nodes, or that they are discovered; of a Redis nothing."""
    address = StoreAddress.parse(kvstore) if kvstore else StoreAddress()
    return DISCOVER if address.discover else ",".join(address.nodes)


class _Rates:
    """Speeds over the last reports in which work was done, rounded so that noise does not look like a change."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._prefill = self._decode = 0
        self._rates = (0.0, 0.0)

    def update(self, stats: EngineStats) -> tuple[float, float]:
        now = time.monotonic()
        seconds = now - self._at
        prefill, decode = stats.prefill_tokens - self._prefill, stats.decode_tokens - self._decode
        if seconds >= 1.0 and (prefill or decode):
            old_prefill, old_decode = self._rates
            self._rates = (
                float(round(prefill / seconds)) if prefill else old_prefill,
                float(round(decode / seconds)) if decode else old_decode,
            )
        if seconds >= 1.0:
            self._at, self._prefill, self._decode = now, stats.prefill_tokens, stats.decode_tokens
        return self._rates
