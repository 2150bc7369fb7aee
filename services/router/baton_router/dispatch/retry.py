"""Limits on failures: a circuit breaker per decode instance, and a budget for retries.

A *breaker* watches the requests on an instance whose health checks pass. It starts closed. After some failures in a row
it opens, and the instance gets no requests for a while. Then it is half open, and one request tries the instance: a
token closes the breaker, another failure opens it for twice as long. A restarted instance is tried at once. If the
breakers of all instances are open, none is respected: a wrong breaker must not cause an outage.

The *budget* bounds the extra work in an outage: retries may be a share of the recent requests. The first retry of a
request whose instance went away is free, because its load went away with the instance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton_router.metrics import Counter
from baton_router.registry.instance import Instance

_MAX_OPEN_S = 30.0
_FORGET_S = 600.0
_WINDOW_S = 10.0
_FREE_PER_S = 2.0
"""Retries per second that are allowed without any requests."""


@dataclass(slots=True)
class _Breaker:
    """State of one instance's breaker; it exists once a request has failed."""

    failures: int = 0
    generation: int = 0
    pause_s: float = 0.0
    until: float = 0.0
    trying: bool = False
    name: str = ""


class Breakers(Collector):
    """The breakers of all decode instances, by address.

    Args:
        failures: Failures in a row that open a breaker; 0 disables breakers.
        open_s: Seconds that a breaker stays open the first time.
        registry: Registry for the metrics.
        now: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        failures: int,
        open_s: float,
        registry: CollectorRegistry,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = failures
        self._open_s = open_s
        self._now = now
        self._breakers: dict[str, _Breaker] = {}
        self._opened = Counter(
            "baton_router_breaker_opened", "Breakers that opened, by instance", ["instance"], registry
        )
        registry.register(self)

    def refused(self, instances: Iterable[Instance]) -> set[tuple[str, int]]:
        """Return the identities of the instances that get no requests now; empty if it would be all of them."""
        if not self._breakers:
            return set()
        now = self._now()
        refuses_all = True
        refused = set()
        for x in instances:
            breaker = self._breakers.get(x.address)
            if breaker is not None and self._refuses(breaker, x, now):
                refused.add(x.identity)
            else:
                refuses_all = False
        return set() if refuses_all else refused

    def _refuses(self, breaker: _Breaker, instance: Instance, now: float) -> bool:
        if not breaker.pause_s:
            return False
        return breaker.trying or (now < breaker.until and breaker.generation == instance.generation)

    def begin(self, instance: Instance) -> None:
        """Record that a request is sent to an instance."""
        breaker = self._breakers.get(instance.address)
        if breaker is not None and breaker.pause_s:
            breaker.trying = True

    def answered(self, instance: Instance) -> None:
        """Record that a request got tokens: a half-open breaker closes; the next failure opens it again."""
        breaker = self._breakers.get(instance.address)
        if breaker is not None and breaker.trying:
            breaker.trying = False
            breaker.pause_s = 0.0
            breaker.failures = self._limit - 1

    def request_ended(self, instance: Instance, *, well: bool) -> None:
        """Record that a request ended on an instance, or was withdrawn, without a failure of the instance.

        Args:
            instance: Decode instance of the request.
            well: Whether the request was completed there.
        """
        breaker = self._breakers.get(instance.address)
        if breaker is not None:
            breaker.trying = False
            if well and not breaker.pause_s:
                del self._breakers[instance.address]

    def failed(self, instance: Instance) -> None:
        """Record a failure that is the instance's fault."""
        if not self._limit:
            return
        now = self._now()
        breaker = self._breakers.get(instance.address)
        if breaker is None:
            self._forget_old(now)
            breaker = self._breakers[instance.address] = _Breaker()
        breaker.failures += 1
        breaker.name = instance.instance_id
        is_open = breaker.pause_s and not breaker.trying
        breaker.trying = False
        if breaker.failures >= self._limit and not (is_open and now < breaker.until):
            breaker.pause_s = min(2 * breaker.pause_s, _MAX_OPEN_S) if breaker.pause_s else self._open_s
            breaker.until = now + breaker.pause_s
            breaker.generation = instance.generation
            self._opened.labels(breaker.name).inc()

    def _forget_old(self, now: float) -> None:
        """Drop the breakers of instances that failed long ago and have not been used since."""
        for address in [key for key, x in self._breakers.items() if x.until and now > x.until + _FORGET_S]:
            del self._breakers[address]

    def collect(self) -> Iterator[Metric]:
        """Yield the state of every breaker: 0 closed, 1 half open, 2 open."""
        family = GaugeMetricFamily(
            "baton_router_breaker_state", "0: closed, 1: half open, 2: open", labels=["instance"]
        )
        now = self._now()
        for x in self._breakers.values():
            state = 0 if not x.pause_s else 2 if now < x.until and not x.trying else 1
            family.add_metric([x.name], state)
        yield family


class RetryBudget:
    """Bounds retries to a share of requests; both counts decay with a time constant of ten seconds.

    Args:
        share: Retries per request.
        registry: Registry for the metrics.
        now: Monotonic clock, in seconds.
    """

    def __init__(self, share: float, registry: CollectorRegistry, *, now: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._now = now
        self._requests = 0.0
        self._retries = 0.0
        self._at = now()
        self._denied = Counter(
            "baton_router_retries_denied", "Second tries that the retry budget refused", ["reason"], registry
        )

    def count_request(self) -> None:
        self._decay()
        self._requests += 1.0

    def try_spend(self, reason: str) -> bool:
        """Return whether a retry is allowed, and count it if so.

        Args:
            reason: Reason of the retry, for the metrics.
        """
        self._decay()
        if self._retries + 1 > self._share * self._requests + _FREE_PER_S * _WINDOW_S:
            self._denied.labels(reason).inc()
            return False
        self._retries += 1.0
        return True

    def _decay(self) -> None:
        now = self._now()
        decay = math.exp((self._at - now) / _WINDOW_S)
        self._at = now
        self._requests *= decay
        self._retries *= decay
