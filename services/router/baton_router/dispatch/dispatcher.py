"""The dispatcher over real instances: places requests and streams their tokens."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from baton.api.v1 import worker_pb2
from baton.config.router import RouterConfig
from baton.errors import QueueFullError, UnavailableError
from baton.tracing import Span
from baton_router.admission.estimates import Estimates, Room
from baton_router.admission.gate import Admission, Ticket, shutting_down
from baton_router.dispatch.attempt import WorkerStreams
from baton_router.dispatch.event_loop import Deadlines, TurnBatcher
from baton_router.dispatch.interface import ChunkQueue, ChunkSink, RoutedChunk, Running
from baton_router.dispatch.prefill_first import PrefillFirstCalls
from baton_router.dispatch.request import DispatchMetrics, RequestContext, RequestRun
from baton_router.dispatch.retry import Breakers, RetryBudget
from baton_router.registry.registry import Registry
from baton_router.scheduler.decision import Decision, DecisionLog
from baton_router.scheduler.placement import Placement, PlacementRequest
from baton_router.scheduler.placer import LowerTiers, Placer, SchedulerMetrics, parse_tier_weights
from baton_router.scheduler.policies.registry import configured_policy
from baton_router.scheduler.speeds import Speeds
from baton_router.types import ModelInfo, RoutedRequest


@dataclass(eq=False, slots=True)
class Reserved:
    """The reservation of a request that its client runs itself.

    What the client reports moves the reservation, but no circuit breaker.

    Attributes:
        placement: Reservation on the instances.
        message: Message that the client sends to the decode instance.
        admission: The gate that admitted the request.
        ticket: Admission of the request.
        on_end: Called when the reservation ends.
        span: Span of the request.
        generated: Tokens that the client reported.
    """

    placement: Placement
    message: worker_pb2.GenerateRequest
    admission: Admission
    ticket: Ticket
    on_end: Callable[[], None]
    span: Span
    generated: int = 0

    def grow(self, tokens: int, *, first: bool) -> None:
        """Count generated tokens.

        Args:
            tokens: Number of new tokens.
            first: Whether they are the request's first ones.
        """
        self.placement.grow(tokens)
        self.generated += tokens
        if first:
            self.placement.prefilled()
            self.admission.first_token(self.ticket)

    def release_room(self) -> None:
        """Let others be placed in its room, as nothing seems to run; may be called any number of times.

        Should it run later, the instance's reports count it, as they count what other routers have placed.
        """
        self.placement.release()
        self.admission.release_room(self.ticket)

    def end(self, status: str) -> None:
        """Release everything; must be called once.

        Args:
            status: ``ok`` or the code of an error.
        """
        try:
            self.placement.release()
            self.span.end(status)
        finally:
            # No instance confirms what a client reports, so fewer tokens than expected give it nothing back.
            self.admission.release(self.ticket, max(self.generated, math.ceil(self.ticket.expected)))
            self.on_end()


class PlacingDispatcher:
    """The :class:`~baton_router.dispatch.interface.Dispatcher` over real instances.

    Args:
        config: Policy and limits.
        registry: Registry of the instances.
        metrics: Registry for the metrics of placement, admission and dispatch.
        decisions: Log of placements; ``None`` creates one.
        steps: The router's turn batcher; ``None`` creates one.

    Attributes:
        metrics: Metrics of dispatch.
        admission: Admits requests to the cluster.
        num_in_flight: Requests that run or wait, including those that their clients run.
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
            on_ended=self._on_ended,
            prefill_first=PrefillFirstCalls(self.metrics.prefill_first),
            slow_instances=estimates.slow,
        )
        registry.on_silent = self._context.streams.send_silent
        self._running: set[RequestRun] = set()
        self._cut_off = False
        self.num_in_flight = 0

    def model_info(self) -> ModelInfo:
        return self._registry.model_info()

    def start(self, request: RoutedRequest, sink: ChunkSink) -> Running:
        run = RequestRun(self._context, request, sink)
        self.num_in_flight += 1
        self._running.add(run)
        if self.num_in_flight > self._config.max_in_flight:
            run.finish(self._too_many(self.num_in_flight - 1))
        elif self._cut_off:
            run.finish(shutting_down())
        else:
            run.start()
        return run

    async def stream(self, request: RoutedRequest) -> AsyncGenerator[RoutedChunk, None]:
        """Run a request; closing the generator cancels it on all instances.

        Raises:
            BatonError: See ``Dispatcher.start``.
        """
        queue = ChunkQueue[RoutedChunk]()
        async with queue.read_chunks(self.start(request, queue)) as chunks:
            async for chunk in chunks:
                yield chunk

    def cut_off(self) -> None:
        """Fail all requests with ``UnavailableError`` and refuse new ones: the router is shutting down."""
        self._cut_off = True
        self.admission.close()
        for run in list(self._running):
            run.finish(shutting_down())

    async def reserve(self, request: RoutedRequest) -> Reserved:
        """Place a request that its client runs itself; the reservation lasts until :meth:`Reserved.end`.

        Raises:
            BatonError: See ``Dispatcher.start``.
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
                self.admission.release(ticket, 0)
            raise
        placement.speeds = None  # this router does not see when its tokens arrive
        # It cannot test a half-open breaker: this router does not see how it ends.
        self._context.breakers.request_ended(placement.decode, well=False)
        return Reserved(placement, message, self.admission, ticket, self._release, request.span)

    def _on_ended(self, run: RequestRun) -> None:
        self._running.discard(run)
        self._release()

    def _release(self) -> None:
        self.num_in_flight -= 1

    def _too_many(self, count: int) -> QueueFullError:
        message = f"{count} requests are in flight already"
        return QueueFullError(message, retry_after_s=self.admission.retry_after_s())

    async def route(self, request: RoutedRequest) -> Decision:
        placement = self._placer.place(PlacementRequest.of(request), reserve=False)
        if placement is None:
            raise UnavailableError("no decode instance is ready", retry_after_s=1.0)
        return placement.decision
