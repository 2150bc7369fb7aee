"""The gRPC calls of a prefill or decode instance, and its load reports; its ``InstanceRole`` runs the requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, nullcontext
from typing import Any

import grpc

from baton.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.config.stores import DISCOVER, StoreAddress
from baton.engine.executor.base import Quality
from baton.engine.request import EngineStats
from baton.engine.sampler import SAMPLER_VERSION
from baton.errors import UnavailableError
from baton.kv_cache.events import KVEvent
from baton.rpc.audit import audit, peer_of
from baton.rpc.convert import fingerprint_to_pb, role_from_pb, role_to_pb
from baton.rpc.multiplex_server import generate_many
from baton.rpc.ticketed_calls import CallEvent, TicketedCalls, load_response, next_events
from baton.types import RequestId, Role
from baton.version import __version__
from baton.worker.context import InstanceRole, WorkerContext

SLOW_S = 2.0
"""Seconds after which any change of the load is reported."""
_ABORTED_S = 10.0
"""Seconds that calls have to end after their requests were aborted."""
_SHARE = 1 / 8
_THRESHOLDS = {"num_waiting": 1, "waiting_prompt_tokens": 2048}
"""Fields of a load report that routers decide by, with the change that is ignored however small the number is."""
_DECODE_THRESHOLDS = {**_THRESHOLDS, "blocks_active": 64}
"""Without ``blocks_active`` on prefill instances: their blocks come and go with each prompt."""
_REQUESTS_THRESHOLD = 1


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """The gRPC service of both roles.

    Args:
        context: The instance's parts.
        role: Role in which the instance starts.
        tickets: Checks the tickets of clients that call without a router; ``None``: they need none.
        change_role: Switches the instance to another role; see :meth:`SetRole`.

    Attributes:
        role: Current role.
    """

    def __init__(
        self,
        context: WorkerContext,
        role: InstanceRole,
        tickets: TicketedCalls | None,
        change_role: Callable[[Role], Awaitable[None]],
    ) -> None:
        self._worker = context
        self.role = role
        self._tickets = tickets
        self._change_role = change_role
        self._load = LoadReporter()

    async def Generate(
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        """Run a request of a direct client."""
        async with aclosing(self._generate(request, context)) as responses:
            async for response in responses:
                yield response

    def _generate(
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.GenerateResponse, None]:
        return self.role.generate(request)

    async def GenerateMany(
        self, requests: AsyncIterator[worker_pb2.GenerateManyRequest], context: Any
    ) -> AsyncIterator[worker_pb2.GenerateManyResponse]:
        """Run many requests on one stream, which routers open; they need no tickets."""
        router = object()
        config = self._worker.base.engine_config
        loads = config.max_loads or 4 * config.max_num_seqs
        messages = generate_many(
            self._generate,
            requests,
            context,
            lambda addresses: self.role.set_silent_prefills(router, addresses),
            # Beyond those that run, load and wait the engine refuses each; as many again may be about to end.
            max_calls=2 * (config.max_num_seqs + loads + config.max_queue),
        )
        try:
            async with aclosing(messages):
                async for message in messages:
                    yield message
        finally:
            self.role.set_silent_prefills(router, frozenset())

    async def Prefill(
        self, request: worker_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        """Offer a prompt's blocks, computed now or beforehand, and keep them until the caller closes the stream."""
        await context.send_initial_metadata(())  # tells the caller that this instance is alive
        async with aclosing(self.role.prefill(request)) as responses:
            async for response in responses:
                yield response

    async def PrefillFirst(
        self, request: worker_pb2.PrefillFirstRequest, context: Any
    ) -> worker_pb2.PrefillFirstResponse:
        """Compute a prompt and let it wait for the decode instance that claims it."""
        return await self.role.prefill_first(request)

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:
        """Abort a request, or drop its unclaimed prompt."""
        request_id = RequestId(request.request_id)
        engine = self._worker.engine
        known = self.role.withdraw(request_id) or await engine.call(lambda: engine.core.abort(request_id))
        return worker_pb2.AbortResponse(found=known)

    async def SetRole(self, request: worker_pb2.SetRoleRequest, context: Any) -> worker_pb2.SetRoleResponse:
        """Switch an idle instance to a role; a drained instance accepts requests again.

        Raises:
            InvalidRequestError: The role is unknown.
            BusyError: The instance is not idle.
        """
        peer = peer_of(context)
        before = self.role.role
        await self._change_role(role_from_pb(request.role))
        audit("role_changed", before=before, now=self.role.role, peer=peer)
        return worker_pb2.SetRoleResponse(previous=role_to_pb(before))

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Any) -> worker_pb2.GetInfoResponse:
        worker = self._worker
        base = worker.base
        executor = base.model.executor
        quality: Quality | None = getattr(executor, "quality", None)  # optional in other packages' executors
        return worker_pb2.GetInfoResponse(
            instance_id=base.instance_id,
            role=role_to_pb(self.role.role),
            epoch=base.model.arena.epoch,
            fingerprint=fingerprint_to_pb(executor.fingerprint),
            num_blocks=base.model.num_blocks,
            max_model_len=worker.engine.core.max_model_len,
            max_num_seqs=base.engine_config.max_num_seqs,
            endpoints=[common_pb2.KvEndpoint(kind=e.kind, address=e.address) for e in worker.block_server.endpoints],
            served_model_name=base.engine_config.model_name,
            model_names=base.engine_config.model_names,
            version=__version__,
            attention_backend=executor.attention_backend,
            device=base.engine_config.device,
            eos_token_ids=sorted(executor.eos_token_ids),
            vocab_size=executor.vocab_size,
            model_path=base.engine_config.model,
            tokenizer_digest=worker.tokenizer_digest,
            kvstore=_store_nodes(base.config.kvstore),
            grammars=worker.engine.core.grammars is not None,
            sampler=SAMPLER_VERSION,
            operators=executor.description,
            quality_kl=None if quality is None else quality.kl,
            quality_top1=None if quality is None else quality.top1,
        )

    async def StreamKvEvents(
        self, request: worker_pb2.StreamKvEventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.StreamKvEventsResponse]:
        base = self._worker.base
        if not base.config.kv_events:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this instance was started with --no-kv-events")
        batches = base.events.follow(
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
        """Report the load, at once and then when it changed; see :class:`LoadReporter`."""
        worker = self._worker
        role = self.role
        interval_s = (request.interval_ms or worker.base.config.load_interval_ms) / 1000
        last = common_pb2.LoadReport()
        slow_at = -math.inf
        events: list[CallEvent] = []
        with self._tickets.follow() if self._tickets else nullcontext(asyncio.Queue[CallEvent]()) as queue:
            while self.role is role:
                now = time.monotonic()
                report = self._load.report(worker.engine.stats, draining=worker.admission.draining)
                report.unreadable_prefills.extend(role.unreadable_prefills())
                if events or is_urgent(report, last, role.role) or (now >= slow_at and report != last):
                    yield load_response(report, events)
                    last = report
                    slow_at = now + SLOW_S
                events = await next_events(queue, interval_s)
        raise UnavailableError(f"this is a {self.role.role} instance now")  # routers call GetInfo again then

    async def ResetPrefixCache(
        self, request: worker_pb2.ResetPrefixCacheRequest, context: Any
    ) -> worker_pb2.ResetPrefixCacheResponse:
        """Drop the cached blocks that are not in use."""
        engine = self._worker.engine
        num_blocks = await engine.call(lambda: engine.core.reset_prefix_cache())
        return worker_pb2.ResetPrefixCacheResponse(num_blocks=num_blocks)

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
        """Stop admission and wait for running requests; with ``migrate``, abort those that do not end in time."""
        admission = self._worker.admission
        left = await admission.drain(request.timeout_ms / 1000)
        if left and request.migrate:
            self._worker.engine.abort_all()
            left = await admission.drain(_ABORTED_S)
        return worker_pb2.DrainResponse(num_unfinished=left)

    async def _snapshot(self) -> tuple[int, list[KVEvent]]:
        """Return the cache's content as events, and the number of the last batch that it includes."""
        engine = self._worker.engine
        base = self._worker.base
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[int, list[KVEvent]]] = loop.create_future()

        def finish_snapshot(events: list[KVEvent]) -> None:
            if not done.done():
                tier_events = [event for snapshot_tier in base.tiers for event in snapshot_tier()]
                done.set_result((base.events.flush(), [*events, *tier_events]))

        def snapshot_pool() -> None:
            # Events of earlier steps reach the log through the same queue of callbacks, so they are counted
            # by the time this one runs: the sequence number fits the snapshot exactly.
            events: list[KVEvent] = list(engine.core.snapshot())
            loop.call_soon_threadsafe(finish_snapshot, events)

        await engine.call(snapshot_pool)
        return await done


class LoadReporter:
    """Makes load reports, with the speeds over the last seconds in which work was done.

    Routers count at once what they place themselves. A report adds what others have placed, that requests wait, or that
    the instance drains. So a report is sent as soon as one of these changed by more than a threshold
    (:func:`is_urgent`), and any other change after ``SLOW_S``: every step of a busy engine changes some number, and
    each message costs its routers more than the number is worth.
    """

    def __init__(self) -> None:
        self._measured_at = time.monotonic()
        self._prefill_tokens = 0
        self._decode_tokens = 0
        self._rates = (0.0, 0.0)

    def report(self, stats: EngineStats, *, draining: bool) -> common_pb2.LoadReport:
        """Return the current report."""
        self._update_rates(stats)
        prefill_rate, decode_rate = self._rates
        return common_pb2.LoadReport(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_loading=stats.num_loading,
            blocks_total=stats.num_blocks,
            blocks_active=stats.blocks_active,
            blocks_cached=stats.blocks_cached,
            waiting_prompt_tokens=stats.waiting_prompt_tokens,
            prefill_tokens_per_s=prefill_rate,
            decode_tokens_per_s=decode_rate,
            num_preemptions=stats.num_preemptions,
            draining=draining,
        )

    def _update_rates(self, stats: EngineStats) -> None:
        """Update the speeds, rounded so that noise does not count as a change."""
        now = time.monotonic()
        seconds = now - self._measured_at
        if seconds < 1.0:
            return
        prefill = stats.prefill_tokens - self._prefill_tokens
        decode = stats.decode_tokens - self._decode_tokens
        old_prefill, old_decode = self._rates
        self._rates = (
            float(round(prefill / seconds)) if prefill else old_prefill,
            float(round(decode / seconds)) if decode else old_decode,
        )
        self._measured_at = now
        self._prefill_tokens = stats.prefill_tokens
        self._decode_tokens = stats.decode_tokens


def is_urgent(report: common_pb2.LoadReport, last: common_pb2.LoadReport, role: Role) -> bool:
    """Whether a number that routers decide by differs by more than a threshold from the last report."""
    if report.unreadable_prefills != last.unreadable_prefills or report.draining != last.draining:
        return True
    if _changed(_num_requests(report), _num_requests(last), _REQUESTS_THRESHOLD):
        return True
    fields = _THRESHOLDS if role is Role.PREFILL else _DECODE_THRESHOLDS
    return any(_changed(getattr(report, name), getattr(last, name), threshold) for name, threshold in fields.items())


def _num_requests(report: common_pb2.LoadReport) -> int:
    return report.num_running + report.num_waiting + report.num_loading


def _changed(now: int, before: int, threshold: int) -> bool:
    # A drop to 0 always counts: routers whose own requests have ended would take the rest for others' work.
    return now == 0 < before or abs(now - before) > max(threshold, _SHARE * before)


def _store_nodes(kvstore: str) -> str:
    """Return ``--kvstore`` as routers need it: the nodes or ``discover``; empty for a Redis or no store."""
    address = StoreAddress.parse(kvstore) if kvstore else StoreAddress()
    return DISCOVER if address.discover else ",".join(address.nodes)
