"""What the runs of all requests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from baton_router.config import RouterConfig
from baton_router.dispatch.deadlines import Deadlines
from baton_router.dispatch.metrics import DispatchMetrics
from baton_router.dispatch.recovery import Breakers, RetryBudget
from baton_router.dispatch.turn_batching import Steps
from baton_router.dispatch.worker_stream import WorkerStreams
from baton_router.registry.instance import Instance
from baton_router.registry.registry import Registry
from baton_router.scheduler.decision_log import DecisionLog
from baton_router.scheduler.placement import Placer
from baton_router.types import RoutedRequest


@dataclass(frozen=True, slots=True)
class RunContext:
    """What every run uses."""

    registry: Registry
    placer: Placer
    metrics: DispatchMetrics
    config: RouterConfig
    breakers: Breakers
    budget: RetryBudget
    streams: WorkerStreams
    deadlines: Deadlines
    steps: Steps
    decisions: DecisionLog = field(default_factory=DecisionLog)
    slow: Callable[[RoutedRequest], Iterable[Instance]] = lambda request: ()
    """Returns the decode instances that are too slow for a request's ``itl_ms``."""
