"""The calls of a prefill or decode instance; what they do for a request is its role's (``InstanceRole``)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from baton.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.config.stores import DISCOVER, StoreAddress
from baton.engine.executor.base import Quality
from baton.engine.sampler import SAMPLER_VERSION
from baton.errors import PermissionDeniedError, UnavailableError
from baton.kv_cache.events import KVEvent
from baton.rpc.audit import audit, peer_of
from baton.rpc.convert import fingerprint_to_pb, role_from_pb, role_to_pb
from baton.rpc.multiplex_server import generate_many
from baton.rpc.ticket import TicketCheck
from baton.types import RequestId, Role
from baton.version import __version__
from baton.worker.context import InstanceRole, WorkerContext
from baton.worker.load_report import SLOW_S, LoadReporter, is_urgent

_ABORTED_S = 10.0
"""Seconds in which calls end whose requests were aborted."""


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves both roles.

    Args:
        context: The instance's parts.
        role: What it does at first.
        tickets: Checks those of clients that come without a router; ``None``: they need none.
        change_role: Makes the instance another role's; see :meth:`SetRole`.

    Attributes:
        role: What it does now.
    """

    def __init__(
        self,
        context: WorkerContext,
        role: InstanceRole,
        tickets: TicketCheck | None,
        change_role: Callable[[Role], Awaitable[None]],
    ) -> None:
        self._worker, self.role = context, role
        self._tickets, self._change_role = tickets, change_role
        self._load = LoadReporter()

    async def Generate(
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        """Run a request that came without a router between: it has a ticket where this instance has a key."""
        responses = self._generate(request, context)
        if self._tickets is not None:
            try:
                self._tickets.verify(request)
            except PermissionDeniedError as error:
                self._worker.metrics.requests.labels("generate", error.code).inc()
                audit("denied", over="grpc", method="Generate", reason="ticket", peer=peer_of(context))
                raise
        async with aclosing(responses):
            async for response in responses:
                yield response

    def _generate(
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.GenerateResponse, None]:
        return self.role.generate(request)

    async def GenerateMany(
        self, requests: AsyncIterator[worker_pb2.GenerateManyRequest], context: Any
    ) -> AsyncIterator[worker_pb2.GenerateManyResponse]:
        """Generate for many requests on one stream, which routers open: what runs on it needs no ticket."""
        router = object()
        messages = generate_many(
            self._generate, requests, context, lambda addresses: self.role.silent_prefills(router, addresses)
        )
        try:
            async with aclosing(messages):
                async for message in messages:
                    yield message
        finally:
            self.role.silent_prefills(router, frozenset())

    async def Prefill(
        self, request: worker_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        """Offer a prompt's blocks, computed now or beforehand, and keep them until the caller closes the stream."""
        await context.send_initial_metadata(())  # the caller knows from it that somebody is here
        async with aclosing(self.role.prefill(request)) as responses:
            async for response in responses:
                yield response

    async def PrefillFirst(
        self, request: worker_pb2.PrefillFirstRequest, context: Any
    ) -> worker_pb2.PrefillFirstResponse:
        """Compute a prompt and let it wait for the decode instance that claims it."""
        return await self.role.prefill_first(request)

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:
        """End a request, or drop the prompt that waits under its id."""
        request_id, engine = RequestId(request.request_id), self._worker.engine
        found = self.role.withdraw(request_id) or await engine.call(lambda: engine.core.abort(request_id))
        return worker_pb2.AbortResponse(found=found)

    async def SetRole(self, request: worker_pb2.SetRoleRequest, context: Any) -> worker_pb2.SetRoleResponse:
        """Make an idle instance one of the other role; a drained one takes requests again.

        Raises:
            InvalidRequestError: There is no such role.
            BusyError: The instance is not idle.
        """
        before = self.role.role
        await self._change_role(role_from_pb(request.role))
        audit("role_changed", before=before, now=self.role.role, peer=peer_of(context))
        return worker_pb2.SetRoleResponse(previous=role_to_pb(before))

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Any) -> worker_pb2.GetInfoResponse:
        """Tell who this is."""
        worker = self._worker
        quality: Quality | None = getattr(worker.executor, "quality", None)  # other packages' executors may have none
        return worker_pb2.GetInfoResponse(
            instance_id=worker.instance_id,
            role=role_to_pb(self.role.role),
            epoch=worker.arena.epoch,
            fingerprint=fingerprint_to_pb(worker.executor.fingerprint),
            num_blocks=worker.arena.num_blocks // worker.executor.layout.num_groups,
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
            grammars=worker.engine.core.grammars is not None,
            sampler=SAMPLER_VERSION,
            operators=worker.executor.description,
            quality_kl=None if quality is None else quality.kl,
            quality_top1=None if quality is None else quality.top1,
        )

    async def StreamKvEvents(
        self, request: worker_pb2.StreamKvEventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.StreamKvEventsResponse]:
        """Follow the prefix cache."""
        if not self._worker.config.kv_events:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this instance was started with --no-kv-events")
        batches = self._worker.events.follow(
            request.from_sequence,
            request.epoch,
            self._snapshot,
            heartbeat_s=request.heartbeat_ms / 1000,
            gather_s=request.gather_ms / 1000,
            packed=request.packed,
        )
        async with aclosing(batches):
            async for batch in batches:
                yield worker_pb2.StreamKvEventsResponse(batch=batch)

    async def StreamLoad(
        self, request: worker_pb2.StreamLoadRequest, context: Any
    ) -> AsyncIterator[worker_pb2.StreamLoadResponse]:
        """Report the load, at once and then when it changed; see :mod:`baton.worker.load_report`."""
        worker, role = self._worker, self.role
        interval_s = (request.interval_ms or worker.config.load_interval_ms) / 1000
        last, slow_at = common_pb2.LoadReport(), -math.inf
        while self.role is role:
            now = time.monotonic()
            report = self._load.report(worker.engine.stats, draining=worker.admission.draining)
            if is_urgent(report, last, role.role) or (now >= slow_at and report != last):
                yield worker_pb2.StreamLoadResponse(load=report)
                last, slow_at = report, now + SLOW_S
            await asyncio.sleep(interval_s)
        raise UnavailableError(f"this is a {self.role.role} instance now")  # a router asks again who this is

    async def ResetPrefixCache(
        self, request: worker_pb2.ResetPrefixCacheRequest, context: Any
    ) -> worker_pb2.ResetPrefixCacheResponse:
        """Drop the cached blocks that are not in use."""
        engine = self._worker.engine
        num_blocks = await engine.call(lambda: engine.core.reset_prefix_cache())
        return worker_pb2.ResetPrefixCacheResponse(num_blocks=num_blocks)

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
        """Stop admission and wait for running requests."""
        admission = self._worker.admission
        left = await admission.drain(request.timeout_ms / 1000)
        if left and request.migrate:
            self._worker.engine.abort_all()
            left = await admission.drain(_ABORTED_S)
        return worker_pb2.DrainResponse(num_unfinished=left)

    async def _snapshot(self) -> tuple[int, list[KVEvent]]:
        engine, log = self._worker.engine, self._worker.events
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[int, list[KVEvent]]] = loop.create_future()

        def give(events: list[KVEvent]) -> None:
            if not done.done():
                done.set_result((log.flush(), [*events, *(x for tier in self._worker.tiers for x in tier())]))

        def take() -> None:
            # Events of earlier steps reach the log through the same queue of callbacks, so they are counted
            # by the time this one runs: the sequence number fits the snapshot exactly.
            events: list[KVEvent] = list(engine.core.snapshot())
            loop.call_soon_threadsafe(give, events)

        await engine.call(take)
        return await done


def _store_nodes(kvstore: str) -> str:
    """Return what routers are told of ``--kvstore``: its nodes, or that they are discovered; of a Redis nothing."""
    address = StoreAddress.parse(kvstore) if kvstore else StoreAddress()
    return DISCOVER if address.discover else ",".join(address.nodes)
