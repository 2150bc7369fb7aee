"""Breakers and the retry budget, on a clock that moves when it is told to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton_router.dispatch.retry import Breakers, RetryBudget


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Named:
    """What breakers look at of an instance."""

    address: str
    generation: int = 1

    @property
    def instance_id(self) -> str:
        return self.address

    @property
    def identity(self) -> tuple[str, int]:
        return self.address, self.generation


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(clock: Clock, failures: int = 3) -> tuple[Any, Any, Any, CollectorRegistry]:
    registry = CollectorRegistry()
    breakers: Any = Breakers(failures, 1.0, registry, now=clock)
    return breakers, Named("bad"), Named("good"), registry


def state(registry: CollectorRegistry, name: str = "bad") -> float | None:
    return registry.get_sample_value("baton_router_breaker_state", {"instance": name})


def test_failures_in_a_row_open_it(clock: Clock) -> None:
    breakers, bad, good, registry = make(clock)
    for _ in range(2):
        breakers.failed(bad)
    assert breakers.refused([bad, good]) == set()
    assert state(registry) == 0
    breakers.failed(bad)
    assert breakers.refused([bad, good]) == {("bad", 1)}
    assert state(registry) == 2
    assert registry.get_sample_value("baton_router_breaker_opened_total", {"instance": "bad"}) == 1


def test_a_success_between_failures_keeps_it_closed(clock: Clock) -> None:
    breakers, bad, good, _ = make(clock)
    for _ in range(5):
        breakers.failed(bad)
        breakers.failed(bad)
        breakers.request_ended(bad, well=True)
    assert breakers.refused([bad, good]) == set()


def test_a_client_that_leaves_between_failures_says_nothing_of_the_instance(clock: Clock) -> None:
    breakers, bad, good, _ = make(clock)
    for _ in range(3):
        breakers.failed(bad)
        breakers.request_ended(bad, well=False)
    assert breakers.refused([bad, good]) == {("bad", 1)}


def test_one_request_tries_it_after_the_pause(clock: Clock) -> None:
    breakers, bad, good, registry = make(clock)
    for _ in range(3):
        breakers.failed(bad)
    clock.now += 1.1
    assert breakers.refused([bad, good]) == set()
    assert state(registry) == 1
    breakers.begin(bad)
    assert breakers.refused([bad, good]) == {("bad", 1)}, "one request is enough to try it"
    breakers.answered(bad)
    assert breakers.refused([bad, good]) == set()
    breakers.failed(bad)
    assert breakers.refused([bad, good]) == {("bad", 1)}, "a failure right after the trial opens it again"


def test_a_trial_that_fails_doubles_the_pause_up_to_a_bound(clock: Clock) -> None:
    breakers, bad, good, _ = make(clock)
    for _ in range(3):
        breakers.failed(bad)
    for pause in (1, 2, 4, 8, 16, 30, 30):
        clock.now += pause - 0.01
        assert breakers.refused([bad, good]) == {("bad", 1)}, pause
        clock.now += 0.02
        assert breakers.refused([bad, good]) == set(), pause
        breakers.begin(bad)
        breakers.failed(bad)


def test_a_trial_whose_client_leaves_decides_nothing(clock: Clock) -> None:
    breakers, bad, good, _ = make(clock)
    for _ in range(3):
        breakers.failed(bad)
    clock.now += 1.1
    breakers.begin(bad)
    breakers.request_ended(bad, well=False)
    assert breakers.refused([bad, good]) == set(), "the next request may try it"


def test_failures_of_those_that_ran_there_before_count_once(clock: Clock) -> None:
    breakers, bad, good, registry = make(clock)
    for _ in range(30):
        breakers.failed(bad)
    assert registry.get_sample_value("baton_router_breaker_opened_total", {"instance": "bad"}) == 1
    clock.now += 1.1
    assert breakers.refused([bad, good]) == set()


def test_an_instance_that_was_restarted_is_tried_at_once(clock: Clock) -> None:
    breakers, bad, good, _ = make(clock)
    for _ in range(3):
        breakers.failed(bad)
    bad.generation += 1
    assert breakers.refused([bad, good]) == set()
    breakers.begin(bad)
    assert breakers.refused([bad, good]) == {("bad", 2)}


def test_when_all_are_open_none_is(clock: Clock) -> None:
    breakers, bad, good, _ = make(clock)
    for _ in range(3):
        breakers.failed(bad)
        breakers.failed(good)
    assert breakers.refused([bad, good]) == set()
    assert breakers.refused([bad, good, Named("third")]) == {("bad", 1), ("good", 1)}


def test_it_can_be_switched_off(clock: Clock) -> None:
    breakers, bad, good, _ = make(clock, failures=0)
    for _ in range(100):
        breakers.failed(bad)
    assert breakers.refused([bad, good]) == set()


def test_the_budget_is_a_share_of_recent_requests(clock: Clock) -> None:
    registry = CollectorRegistry()
    budget = RetryBudget(0.2, registry, now=clock)
    for _ in range(1000):
        budget.count_request()
    granted = sum(budget.try_spend("internal") for _ in range(1000))
    assert granted == 220  # a fifth, and what needs no requests
    assert registry.get_sample_value("baton_router_retries_denied_total", {"reason": "internal"}) == 780
    clock.now += 60
    assert sum(budget.try_spend("internal") for _ in range(1000)) == pytest.approx(20, abs=1), (
        "old requests don't count"
    )
    clock.now += 60
    assert budget.try_spend("internal")


def test_requests_after_a_quiet_minute_count_in_full(clock: Clock) -> None:
    budget = RetryBudget(0.2, CollectorRegistry(), now=clock)
    clock.now += 60
    for _ in range(1000):
        budget.count_request()
    assert sum(budget.try_spend("internal") for _ in range(1000)) == 220
    clock.now += 60
    for _ in range(1000):
        budget.count_request()
        clock.now += 0.001
    assert sum(budget.try_spend("internal") for _ in range(1000)) == pytest.approx(210, abs=2), (
        "they came within a second"
    )
