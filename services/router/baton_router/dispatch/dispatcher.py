"""Implements the router's seam: places requests on instances and carries their streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from baton.api.v1 import worker_pb2
from baton.errors import BatonError, InternalError, QueueFullError, UnavailableError
from baton_router.admission import Admission, Limits, Ticket
from baton_router.admission.estimates import Estimates
from baton_router.admission.room import Room
from baton_router.config import RouterConfig
from baton_router.dispatch.chunk_queue import ChunkQueue
from baton_router.dispatch.deadlines import Deadlines
from baton_router.dispatch.interface import ChunkSink, RoutedChunk, Running
from baton_router.dispatch.metrics import DispatchMetrics
from baton_router.dispatch.recovery import Breakers, RetryBudget
from baton_router.dispatch.run import RequestRun
from baton_router.dispatch.run_context import RunContext
from baton_router.dispatch.turn_batching import PLACE, Steps
from baton_router.dispatch.worker_stream import WorkerStreams
from baton_router.registry.registry import Registry
from baton_router.scheduler.decision import Decision
from baton_router.scheduler.decision_log import DecisionLog
from baton_router.scheduler.metrics import SchedulerMetrics
from baton_router.scheduler.placement import LowerTiers, Placement, PlacementRequest, Placer
from baton_router.scheduler.policies import make_policy
from baton_router.scheduler.policies.registry import parse_tier_weights
from baton_router.scheduler.speeds import Speeds
from baton_router.types import ModelInfo, RoutedRequest


@dataclass(eq=False, slots=True)
class Reserved:
    """A request's place while somebody else runs it.

    Attributes:
        placement: Its shares of its instances.
        message: What is to be sent to the decode instance.
        failed: Whether the instance broke off.
    """

    placement: Placement
    message: worker_pb2.GenerateRequest
    admission: Admission
    ticket: Ticket
    breakers: Breakers
    on_end: Callable[[], None]
    failed: bool = False

    def grow(self, tokens: int, *, first: bool) -> None:
        """Count tokens that were generated."""
        self.placement.grow(tokens)
        if first:
            self.placement.prefilled()
            self.breakers.answered(self.placement.decode)
            self.admission.first_token(self.ticket)

    def end(self) -> None:
        """Give everything back; once."""
        if self.failed:
            self.breakers.failed(self.placement.decode)
        self.breakers.ended(self.placement.decode, well=not self.failed)
        self.placement.release()
        self.admission.leave(self.ticket)
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
        steps: Steps | None = None,
    ) -> None:
        steps = steps or Steps()
        self._registry = registry
        self.metrics = DispatchMetrics(metrics)
        self._config = config
        speeds = Speeds()
        self._placer = Placer(
            registry,
            make_policy(config.policy, config.policy_context(speeds)),
            SchedulerMetrics(metrics, registry.ready),
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
            Limits(
                config.queue_requests,
                config.queue_tokens,
                config.queue_tenant_share,
                config.queue_timeout_s,
                config.no_instance_wait_s,
            ),
            metrics,
        )
        self._context = RunContext(
            registry,
            self._placer,
            self.metrics,
            config,
            breakers=Breakers(config.breaker_failures, config.breaker_open_s, metrics),
            budget=RetryBudget(config.retry_budget, metrics),
            decisions=decisions or DecisionLog(),
            streams=WorkerStreams(steps),
            deadlines=Deadlines(config.request_timeout_s),
            steps=steps,
            slow=estimates.slow,
        )
        self._running: set[_Running] = set()
        self._cut_off = False
        self.num_in_flight = 0

    def model_info(self) -> ModelInfo:
        """Return what is served; see ``Dispatcher.model_info``."""
        return self._registry.model_info()

    def start(self, request: RoutedRequest, sink: ChunkSink) -> Running:
        """Begin a request; see ``Dispatcher.start``."""
        running = _Running(self, request, sink)
        running.start()
        return running

    async def stream(self, request: RoutedRequest) -> AsyncGenerator[RoutedChunk, None]:
        """Run a request; closing the generator cancels it everywhere.

        Raises:
            BatonError: See ``Dispatcher.start``.
        """
        chunks: ChunkQueue[RoutedChunk] = ChunkQueue()
        async with chunks.of(self.start(request, chunks)) as items:
            async for chunk in items:
                yield chunk

    def cut_off(self) -> None:
        """End everything that runs or waits with ``UnavailableError``, and refuse new ones: the router ends."""
        self._cut_off = True
        self.admission.close()
        for running in list(self._running):
            running.on_end(_shutting_down())

    async def reserve(self, request: RoutedRequest) -> Reserved:
        """Place a request that somebody else runs, and hold its shares until :meth:`Reserved.end`.

        Raises:
            BatonError: As :meth:`stream` before its first chunk.
        """
        if self.num_in_flight >= self._config.max_in_flight:
            message = f"{self.num_in_flight} requests are in flight already"
            raise QueueFullError(message, retry_after_s=self.admission.retry_after_s())
        self.num_in_flight += 1
        ticket = None
        try:
            ticket = await self.admission.enter(request)
            placement, message_pb = await RequestRun(self._context, request, ticket.waited_s).place()
        except BaseException:
            self._leave()
            if ticket is not None:
                self.admission.leave(ticket)
            raise
        placement.speeds = None  # nobody here sees when its tokens come
        return Reserved(placement, message_pb, self.admission, ticket, self._context.breakers, self._leave)

    def _leave(self) -> None:
        self.num_in_flight -= 1

    async def route(self, request: RoutedRequest) -> Decision:
        """Say where the request would go; see ``Dispatcher.route``.

        Raises:
            UnavailableError: No decode instance is ready.
        """
        ask = PlacementRequest(
            request.prompt_token_ids,
            request.cache_salt,
            request.sampling.n,
            session=request.session,
            max_tokens=request.sampling.max_tokens,
        )
        placement = self._placer.place(ask, reserve=False)
        if placement is None:
            raise UnavailableError("no decode instance is ready", retry_after_s=1.0)
        return placement.decision


class _Running:
    """One request from its arrival to its end; the sink of its run."""

    __slots__ = ("_begun", "_dispatcher", "_ended", "_held", "_request", "_run", "_sink", "_ticket", "_waiting")

    def __init__(self, dispatcher: PlacingDispatcher, request: RoutedRequest, sink: ChunkSink) -> None:
        self._dispatcher, self._request = dispatcher, request
        self._sink: ChunkSink = sink
        self._ticket: Ticket | None = None
        self._run: RequestRun | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._begun = self._ended = self._held = False

    def start(self) -> None:
        dispatcher = self._dispatcher
        dispatcher.num_in_flight += 1
        dispatcher._running.add(self)
        if dispatcher.num_in_flight > dispatcher._config.max_in_flight:
            message = f"{dispatcher.num_in_flight - 1} requests are in flight already"
            self.on_end(QueueFullError(message, retry_after_s=dispatcher.admission.retry_after_s()))
        elif dispatcher._cut_off:
            self.on_end(_shutting_down())
        else:
            dispatcher._context.steps.later(PLACE, _Running._enter_now, self)

    def _enter_now(self) -> None:
        """Take room and a place in one step: until it has a place, no instance's books know of a request."""
        if self._ended:
            return
        try:
            ticket = self._dispatcher.admission.enter_now(self._request)
            if ticket is not None:
                self._go(ticket)
            else:
                self._waiting = asyncio.get_running_loop().create_task(self._enter())
        except Exception as error:
            self.on_end(error)

    async def _enter(self) -> None:
        try:
            ticket = await self._dispatcher.admission.enter(self._request)
        except Exception as error:
            self._waiting = None
            self.on_end(error)
            return
        self._waiting = None
        self._go(ticket)

    def _go(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._run = RequestRun(self._dispatcher._context, self._request, ticket.waited_s, self)
        if self._held:
            self._run.hold(True)
        self._run.start()

    def on_chunk(self, chunk: RoutedChunk) -> None:
        if not self._begun:
            self._begun = True
            assert self._ticket is not None
            self._dispatcher.admission.first_token(self._ticket)
        self._sink.on_chunk(chunk)

    def on_end(self, error: Exception | None) -> None:
        if self._ended:
            return
        if error is not None:
            code = error.code if isinstance(error, BatonError) else InternalError.code
            self._dispatcher.metrics.failures.labels(code).inc()
        sink = self._sink
        self._leave()
        sink.on_end(error)

    def cancel(self) -> None:
        if not self._ended:
            self._dispatcher.metrics.closed_early.inc()
            self._leave()

    def hold(self, held: bool) -> None:
        self._held = held
        if self._run is not None:
            self._run.hold(held)

    def _leave(self) -> None:
        self._ended = True
        dispatcher = self._dispatcher
        dispatcher.num_in_flight -= 1
        dispatcher._running.discard(self)
        if self._waiting is not None:
            self._waiting.cancel()
        run, self._run = self._run, None
        if run is not None:
            run.cancel()
        self._sink = _NOBODY  # no circle is left that a collector would have to find
        if self._ticket is not None:
            dispatcher.admission.leave(self._ticket)


class _Nobody:
    """Whom the end of a request tells nothing."""

    def on_chunk(self, chunk: RoutedChunk) -> None:
        """Drop a chunk."""

    def on_end(self, error: Exception | None) -> None:
        """Drop the end."""


_NOBODY = _Nobody()


def _shutting_down() -> UnavailableError:
    return UnavailableError("this router is shutting down: send the request again", retry_after_s=1.0)
