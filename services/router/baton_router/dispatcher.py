"""Implements the router's seam: places requests on instances and carries their streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from baton.api.v1 import worker_pb2
from baton.errors import BatonError, InternalError, QueueFullError, UnavailableError
from baton_router.admission import Admission, Limits, Ticket
from baton_router.admission.estimates import Estimates
from baton_router.admission.room import Room
from baton_router.config import RouterConfig
from baton_router.core import ModelInfo, RoutedChunk, RoutedRequest
from baton_router.cut_off import CutOff
from baton_router.decision import Decision
from baton_router.decisions import DecisionLog
from baton_router.metrics import RouterMetrics
from baton_router.placement import Ask, Placement, Placer
from baton_router.policy import make_policy
from baton_router.policy.plugin import parse_tier_weights
from baton_router.recovery import Breakers, RetryBudget
from baton_router.registry import Registry
from baton_router.run import RequestRun, RunContext
from baton_router.speeds import Speeds


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
    """The :class:`~baton_router.core.Dispatcher` over real instances.

    Args:
        config: Policy and limits.
        registry: The instances.
        metrics: Where requests are counted.
        decisions: Where placements are remembered.
    """

    def __init__(
        self, config: RouterConfig, registry: Registry, metrics: RouterMetrics, decisions: DecisionLog | None = None
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._config = config
        speeds = Speeds()
        self._placer = Placer(
            registry,
            make_policy(config.policy, config.policy_context(speeds)),
            metrics,
            max_prefills=config.prefill_candidates,
            threshold=config.remote_prefill_threshold,
            speeds=speeds,
            tier_weights=parse_tier_weights(config.tier_weights),
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
            metrics.registry,
        )
        self._context = RunContext(
            registry,
            self._placer,
            metrics,
            config,
            breakers=Breakers(config.breaker_failures, config.breaker_open_s, metrics.registry),
            budget=RetryBudget(config.retry_budget, metrics.registry),
            decisions=decisions or DecisionLog(metrics.decision_terms),
            slow=estimates.slow,
        )
        self._cut_off = CutOff()
        self.num_in_flight = 0

    def model_info(self) -> ModelInfo:
        """Return what is served; see ``Dispatcher.model_info``."""
        return self._registry.model_info()

    async def stream(self, request: RoutedRequest) -> AsyncGenerator[RoutedChunk, None]:
        """Run a request; see ``Dispatcher.stream``."""
        if self.num_in_flight >= self._config.max_in_flight:
            self._metrics.failures.labels(code=QueueFullError.code).inc()
            message = f"{self.num_in_flight} requests are in flight already"
            raise QueueFullError(message, retry_after_s=self.admission.retry_after_s())
        self.num_in_flight += 1
        ticket = None
        try:
            ticket = await self.admission.enter(request)
            begun = False
            async with contextlib.aclosing(RequestRun(self._context, request, ticket.waited_s).chunks()) as chunks:
                while (chunk := await self._cut_off.next(chunks)) is not None:
                    if not begun:
                        begun = True
                        self.admission.first_token(ticket)
                    yield chunk
        except BatonError as error:
            self._metrics.failures.labels(code=error.code).inc()
            raise
        except (GeneratorExit, asyncio.CancelledError):
            self._metrics.closed_early.inc()
            raise
        except Exception:
            self._metrics.failures.labels(code=InternalError.code).inc()
            raise
        finally:
            self.num_in_flight -= 1
            if ticket is not None:
                self.admission.leave(ticket)

    def cut_off(self) -> None:
        """End everything that runs or waits with ``UnavailableError``, and refuse new ones: the router ends."""
        self.admission.close()
        self._cut_off.close()

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
        ask = Ask(
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
