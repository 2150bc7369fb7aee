"""Implements the router's seam: places requests on instances and carries their streams."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from baton.api.v1 import common_pb2, worker_pb2
from baton.config.router import RouterConfig
from baton.errors import QueueFullError, UnavailableError
from baton.tokenizer import TokenDelta
from baton.tracing import Span
from baton_router.admission.estimates import Estimates, Room
from baton_router.admission.gate import Admission, Ticket
from baton_router.dispatch.attempt import WorkerStreams
from baton_router.dispatch.event_loop import Deadlines, TurnBatcher
from baton_router.dispatch.interface import ChunkQueue, ChunkSink, RoutedChunk, Running
from baton_router.dispatch.metrics import DispatchMetrics
from baton_router.dispatch.prefill_first import PrefillFirstCalls
from baton_router.dispatch.request import RequestContext, RequestRun
from baton_router.dispatch.retry import Breakers, RetryBudget
from baton_router.registry.registry import Registry
from baton_router.scheduler.decision import Decision, DecisionLog
from baton_router.scheduler.metrics import SchedulerMetrics
from baton_router.scheduler.placement import Placement, PlacementRequest
from baton_router.scheduler.placer import LowerTiers, Placer, parse_tier_weights
from baton_router.scheduler.policies.registry import configured_policy
from baton_router.scheduler.speeds import Speeds
from baton_router.types import ModelInfo, RoutedRequest


class _Chunks(ChunkQueue[RoutedChunk]):
    """A request's chunks, read by one task."""

    def on_tokens(self, index: int, token_ids: list[int]) -> None:
        self.on_chunk(RoutedChunk([TokenDelta(index, token_ids)]))


@dataclass(eq=False, slots=True)
class Reserved:
    """A request's place while its client runs it. What its client reports moves these shares and no breaker.

    Attributes:
        placement: Its shares of its instances.
        message: What is to be sent to the decode instance.
    """

    placement: Placement
    message: worker_pb2.GenerateRequest
    admission: Admission
    ticket: Ticket
    on_end: Callable[[], None]
    span: Span

    def grow(self, tokens: int, *, first: bool) -> None:
        """Count tokens that were generated."""
        self.placement.grow(tokens)
        if first:
            self.placement.prefilled()
            self.admission.first_token(self.ticket)

    def end(self, status: str) -> None:
        """Give everything back, once; ``status``: ``ok`` or an error's code."""
        self.placement.release()
        self.admission.leave(self.ticket)
        self.span.end(status)
        self.on_end()


class PlacingDispatcher:
    """The :class:`~baton_router.types.Dispatcher` over real instances.

    Args:
        config: Policy and limits.
        registry: The instances.
        metrics: Takes the metrics of placement, admission and dispatch.
        decisions: Where placements are remembered.
        steps: Of this router's requests; ``None``: this dispatcher has its own.
    """

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        metrics: CollectorRegistry,
        decisions: DecisionLog | None = None,
        steps: TurnBatcher | None = None,
    ) -> None:
        steps = steps or TurnBatcher()
        self._registry = registry
        self.metrics = DispatchMetrics(metrics)
        self._config = config
        speeds = Speeds()
        placements = SchedulerMetrics(metrics, registry.ready)
        decisions = decisions or DecisionLog()
        decisions.on_placed = placements.observe_terms
        self._placer = Placer(
            registry,
            configured_policy(config, speeds),
            placements,
            max_prefills=config.prefill_candidates,
            threshold=config.remote_prefill_threshold,
            speeds=speeds,
            tiers=LowerTiers(parse_tier_weights(config.tier_weights), registry.stores),
            seed=config.policy_seed,
        )
        estimates = Estimates(self._placer, speeds, registry)
        self.admission = Admission(
            Room(registry, speeds, config.instance_slots, config.prefill_queue_tokens, time.monotonic),
            estimates,
            config,
            metrics,
        )
        self._context = RequestContext(
            registry,
            self._placer,
            self.metrics,
            config,
            self.admission,
            breakers=Breakers(config.breaker_failures, config.breaker_open_s, metrics),
            budget=RetryBudget(config.retry_budget, metrics),
            decisions=decisions,
            streams=WorkerStreams(steps),
            deadlines=Deadlines(config.request_timeout_s),
            steps=steps,
            left=self._left,
            prefill_first=PrefillFirstCalls(self.metrics.prefill_first),
            slow=estimates.slow,
        )
        registry.on_silent = self._context.streams.tell_silent
        self._running: set[RequestRun] = set()
        self._cut_off = False
        self.num_in_flight = 0

    def model_info(self) -> ModelInfo:
        """Return what is served; see ``Dispatcher.model_info``."""
        return self._registry.model_info()

    def start(self, request: RoutedRequest, sink: ChunkSink) -> Running:
        """Begin a request; see ``Dispatcher.start``."""
        run = RequestRun(self._context, request, sink)
        self.num_in_flight += 1
        self._running.add(run)
        if self.num_in_flight > self._config.max_in_flight:
            run.finish(self._too_many(self.num_in_flight - 1))
        elif self._cut_off:
            run.finish(_shutting_down())
        else:
            run.start()
        return run

    async def stream(self, request: RoutedRequest) -> AsyncGenerator[RoutedChunk, None]:
        """Run a request; closing the generator cancels it everywhere.

        Raises:
            BatonError: See ``Dispatcher.start``.
        """
        chunks = _Chunks()
        async with chunks.of(self.start(request, chunks)) as items:
            async for chunk in items:
                yield chunk

    def cut_off(self) -> None:
        """End everything that runs or waits with ``UnavailableError``, and refuse new ones: the router ends."""
        self._cut_off = True
        self.admission.close()
        for run in list(self._running):
            run.finish(_shutting_down())

    def observe_trace(self, trace: common_pb2.RequestTrace) -> None:
        """Count how a request that its client ran came to its KV."""
        self.metrics.observe_trace(trace)

    async def reserve(self, request: RoutedRequest) -> Reserved:
        """Place a request that its client runs, and hold its shares until :meth:`Reserved.end`.

        Raises:
            BatonError: As :meth:`stream` before its first chunk.
        """
        if self.num_in_flight >= self._config.max_in_flight:
            raise self._too_many(self.num_in_flight)
        self.num_in_flight += 1
        ticket = None
        try:
            ticket = await self.admission.enter(request)
            placement, message = await RequestRun(self._context, request).place(ticket)
        except BaseException:
            self._release()
            if ticket is not None:
                self.admission.leave(ticket)
            raise
        placement.speeds = None  # this router does not see when its tokens come
        # It is no trial of a half-open breaker: this router does not see how it ends.
        self._context.breakers.ended(placement.decode, well=False)
        return Reserved(placement, message, self.admission, ticket, self._release, request.span)

    def _left(self, run: RequestRun) -> None:
        self._running.discard(run)
        self._release()

    def _release(self) -> None:
        self.num_in_flight -= 1

    def _too_many(self, count: int) -> QueueFullError:
        message = f"{count} requests are in flight already"
        return QueueFullError(message, retry_after_s=self.admission.retry_after_s())

    async def route(self, request: RoutedRequest) -> Decision:
        """Say where the request would go; see ``Dispatcher.route``.

        Raises:
            UnavailableError: No decode instance is ready.
        """
        placement = self._placer.place(PlacementRequest.of(request), reserve=False)
        if placement is None:
            raise UnavailableError("no decode instance is ready", retry_after_s=1.0)
        return placement.decision


def _shutting_down() -> UnavailableError:
    return UnavailableError("this router is shutting down: send the request again", retry_after_s=1.0)
