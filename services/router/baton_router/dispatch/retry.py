"""What keeps failures from spreading: circuit breakers per decode instance, and a budget for second tries.

A *breaker* watches what requests meet on an instance whose health checks are fine. It is closed at first; after some
failures in a row it opens and the instance gets nothing for a while; then it is half open and one request tries the
instance: a token closes the breaker, another failure opens it for twice as long. An instance that was restarted is
tried at once. Where every instance's breaker is open none counts: a wrong breaker must not be an outage.

The *budget* bounds how much work an outage makes: second tries may be a share of the recent requests. A request whose
instance went away moves for free, the first time: its load went with the instance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton_router.metrics.fast_metrics import Counter
from baton_router.registry.instance import Instance

_MAX_OPEN_S = 30.0
_FORGET_S = 600.0
_WINDOW_S = 10.0
_FREE_PER_S = 2.0
"""Second tries per second that need no requests beside them."""


@dataclass(slots=True)
class _Breaker:
    """One instance's record; there is none while nothing has failed."""

    failures: int = 0
    generation: int = 0
    pause_s: float = 0.0
    until: float = 0.0
    trying: bool = False
    name: str = ""


class Breakers(Collector):
    """The breakers of all decode instances, by address.

    Args:
        failures: Failures in a row that open a breaker; 0: none ever opens.
        open_s: Seconds it stays open the first time.
        registry: Takes the metrics.
        now: The clock.
    """

    def __init__(
        self,
        failures: int,
        open_s: float,
        registry: CollectorRegistry,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit, self._open_s, self._now = failures, open_s, now
        self._breakers: dict[str, _Breaker] = {}
        self._opened = Counter(
            "baton_router_breaker_opened", "Breakers that opened, by instance", ["instance"], registry
        )
        registry.register(self)

    def refused(self, instances: Iterable[Instance]) -> set[tuple[str, int]]:
        """Return the identities of those that are to get nothing now; empty if that would be all of them."""
        if not self._breakers:
            return set()
        now, all_of_them, refused = self._now(), True, set()
        for x in instances:
            breaker = self._breakers.get(x.address)
            if breaker is not None and self._is_closed_to(breaker, x, now):
                refused.add(x.identity)
            else:
                all_of_them = False
        return set() if all_of_them else refused

    def _is_closed_to(self, breaker: _Breaker, instance: Instance, now: float) -> bool:
        if not breaker.pause_s:
            return False
        return breaker.trying or (now < breaker.until and breaker.generation == instance.generation)

    def begin(self, instance: Instance) -> None:
        """Note that a request goes to an instance."""
        breaker = self._breakers.get(instance.address)
        if breaker is not None and breaker.pause_s:
            breaker.trying = True

    def answered(self, instance: Instance) -> None:
        """Note that a request got tokens: a half-open breaker closes; the next failure opens it again."""
        breaker = self._breakers.get(instance.address)
        if breaker is not None and breaker.trying:
            breaker.trying, breaker.pause_s, breaker.failures = False, 0.0, self._limit - 1

    def ended(self, instance: Instance, *, well: bool) -> None:
        """Note that a request has left an instance without failing there: at its end, or because its client went."""
        breaker = self._breakers.get(instance.address)
        if breaker is not None:
            breaker.trying = False
            if well and not breaker.pause_s:
                del self._breakers[instance.address]

    def failed(self, instance: Instance) -> None:
        """Note a failure that is the instance's fault."""
        if not self._limit:
            return
        now = self._now()
        breaker = self._breakers.get(instance.address)
        if breaker is None:
            self._forget(now)
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

    def _forget(self, now: float) -> None:
        """Drop what is known of instances that failed long ago and were not met again."""
        for address in [key for key, x in self._breakers.items() if x.until and now > x.until + _FORGET_S]:
            del self._breakers[address]

    def collect(self) -> Iterator[Metric]:
        """Yield the state of every instance that has failed: 0 closed, 1 half open, 2 open."""
        family = GaugeMetricFamily(
            "baton_router_breaker_state", "0: closed, 1: half open, 2: open", labels=["instance"]
        )
        now = self._now()
        for x in self._breakers.values():
            state = 0 if not x.pause_s else 2 if now < x.until and not x.trying else 1
            family.add_metric([x.name], state)
        yield family


class RetryBudget:
    """Second tries as a share of requests, both counted with a memory of ten seconds.

    Args:
        share: Second tries per request.
        registry: Takes the metrics.
        now: The clock.
    """

    def __init__(self, share: float, registry: CollectorRegistry, *, now: Callable[[], float] = time.monotonic) -> None:
        self._share, self._now = share, now
        self._requests = self._retries = 0.0
        self._at = now()
        self._denied = Counter(
            "baton_router_retries_denied", "Second tries that the retry budget refused", ["reason"], registry
        )

    def count_request(self) -> None:
        """Count a request that begins."""
        self._fade()
        self._requests += 1.0

    def take(self, reason: str) -> bool:
        """Whether a second try may be made; counts it if so.

        Args:
            reason: Why there is a second try, for the metrics.
        """
        self._fade()
        if self._retries + 1 > self._share * self._requests + _FREE_PER_S * _WINDOW_S:
            self._denied.labels(reason).inc()
            return False
        self._retries += 1.0
        return True

    def _fade(self) -> None:
        """Let what was counted so far grow older; whatever is counted next is new."""
        now = self._now()
        fade = math.exp((self._at - now) / _WINDOW_S)
        self._at = now
        self._requests *= fade
        self._retries *= fade
