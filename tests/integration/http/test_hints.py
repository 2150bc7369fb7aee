"""``nvext.agent_hints`` on all four endpoints: where the hints arrive, what is clipped, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.support.servers.http_front import CHAT, Served

from baton_router.accounts import Accounts, entries_of_tenants
from baton_router.types import RoutedRequest

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 40},
    "/v1/completions": {"prompt": "def", "max_tokens": 40},
    "/v1/responses": {"input": "def", "max_output_tokens": 40},
    "/v1/messages": {"messages": CHAT, "max_tokens": 40},
}
endpoints = pytest.mark.parametrize("path", BODIES)


@pytest.fixture(scope="module")
def keyed() -> Iterator[Served]:
    tenants = {"one": {"keys": ["key-one"], "priority_floor": -5}, "two": {"keys": ["key-two"]}}
    with Served(accounts=Accounts(entries_of_tenants({"tenants": tenants}), b"secret")) as served:
        yield served


def send(api: Served, path: str, hints: Any, **more: Any) -> tuple[httpx.Response, RoutedRequest]:
    answer = api.post(path, {**BODIES[path], **more, "nvext": {"agent_hints": hints}})
    assert answer.status_code == 200, answer.text
    return answer, api.dispatcher.requests[-1]


@endpoints
@pytest.mark.parametrize("stream", [False, True])
def test_hints_arrive(api: Served, path: str, stream: bool) -> None:
    answer, request = send(api, path, {"priority": 7, "osl": 30}, stream=stream)
    assert (request.priority, request.expected_tokens) == (-7, 30)
    assert "x-baton-clipped" not in answer.headers
    assert "x-baton-ignored-fields" not in answer.headers


@endpoints
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_beyond_a_tenants_rights_is_clipped_and_said(keyed: Served, path: str, stream: bool) -> None:
    answer, request = send(keyed, path, {"priority": 7, "osl": 41}, stream=stream)
    assert (request.priority, request.expected_tokens) == (-5, 40)
    assert answer.headers["x-baton-clipped"] == "osl, priority"
    answer, request = send(keyed, path, {"priority": 5, "osl": 40}, stream=stream)
    assert (request.priority, request.expected_tokens) == (-5, 40)
    assert "x-baton-clipped" not in answer.headers


def test_a_priority_of_the_body_or_a_header_goes_before_hints_and_is_clipped_alike(keyed: Served) -> None:
    path = "/v1/chat/completions"
    answer, request = send(keyed, path, {"priority": 100}, priority=3)
    assert request.priority == 3
    assert "x-baton-clipped" not in answer.headers
    for headers, priority in (({}, -9), ({"x-baton-priority": "-8"}, 1)):
        body = {**BODIES[path], "priority": priority, "nvext": {"agent_hints": {"strict_priority": 100}}}
        answer = keyed.post(path, body, headers=headers)
        assert keyed.dispatcher.requests[-1].priority == -5
        assert answer.headers["x-baton-clipped"] == "priority"


def test_priorities_keep_their_order_and_stay_above_idle_work(api: Served) -> None:
    most = 2**62
    rising: list[dict[str, Any]] = [
        {"priority": -most},
        {"latency_sensitivity": -2.6},
        {"priority": 0, "latency_sensitivity": 9.0},
        {"latency_sensitivity": 2.4},
        {"priority": 3},
        {"priority": most},
        {"strict_priority": 1, "priority": -most},
        {"strict_priority": 1},
        {"strict_priority": 2},
        {"strict_priority": most, "priority": most},
    ]
    sent = [send(api, "/v1/completions", hints) for hints in rising]
    priorities = [request.priority for _, request in sent]
    assert priorities == sorted(priorities, reverse=True)
    assert len(set(priorities)) == len(rising)
    assert -(2**30) <= min(priorities) < max(priorities) < 2**30
    clipped = [answer.headers.get("x-baton-clipped") for answer, _ in sent]
    assert [most in hints.values() or -most in hints.values() for hints in rising] == [x == "priority" for x in clipped]


@endpoints
@pytest.mark.parametrize(
    ("nvext", "field"),
    [
        (5, "nvext"),
        ({"agent_hints": []}, "nvext.agent_hints"),
        ({"agent_hints": {"priority": "high"}}, "nvext.agent_hints.priority"),
        ({"agent_hints": {"priority": 1.5}}, "nvext.agent_hints.priority"),
        ({"agent_hints": {"strict_priority": -1}}, "nvext.agent_hints.strict_priority"),
        ({"agent_hints": {"osl": 0}}, "nvext.agent_hints.osl"),
        ({"agent_hints": {"osl": True}}, "nvext.agent_hints.osl"),
        ({"agent_hints": {"latency_sensitivity": "1"}}, "nvext.agent_hints.latency_sensitivity"),
    ],
)
def test_malformed_hints_are_refused_by_name(api: Served, path: str, nvext: Any, field: str) -> None:
    answer = api.post(path, {**BODIES[path], "nvext": nvext})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


@endpoints
def test_what_has_no_effect_is_named(api: Served, path: str) -> None:
    hints = {"osl": 3, "total_requests": 9, "context_id": None}
    body = {**BODIES[path], "nvext": {"agent_hints": hints, "annotations": ["x"]}}
    answer = api.post(path, body)
    named = answer.headers["x-baton-ignored-fields"].split(", ")
    assert named == ["nvext.annotations", "nvext.agent_hints.total_requests"]
    for nothing in (None, {}, {"agent_hints": None}):
        answer = api.post(path, {**BODIES[path], "nvext": nothing})
        assert (answer.status_code, "x-baton-ignored-fields" in answer.headers) == (200, False)
