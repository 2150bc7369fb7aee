"""A request's span: what is noted on its way, whose part it is, and what instances are told of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.support.router.world import World, make_request, run
from tests.support.servers.http_front import Served
from tests.support.spans import MemoryExporter

from baton.errors import UnavailableError
from baton.tracing import UNTRACED, Span, parse_traceparent

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def names(span: Span) -> list[str]:
    return [event.name for event in span.events]


async def test_a_span_tells_the_way_of_a_request_and_instances_get_its_context(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    exporter = MemoryExporter()
    span = Span("request", parse_traceparent(PARENT), exporter)
    await run(router, replace(make_request(), span=span))
    assert exporter.spans == [span]
    assert (names(span), span.status) == (["admitted", "placed", "first_token"], "ok")
    assert span.events[1].detail == "d0"
    assert dict(decode.state.requests[0].trace_context) == {"traceparent": str(span.context)}


async def test_a_span_tells_of_failures_and_of_the_last_error(world: World) -> None:
    decodes = await world.decodes(2)
    router = await world.cluster([], decodes, max_retries=1)
    for worker in decodes:
        worker.state.refuse = UnavailableError("not now")
    exporter = MemoryExporter()
    span = Span("request", None, exporter)
    with pytest.raises(UnavailableError):
        await run(router, replace(make_request(), span=span))
    assert names(span)[:4] == ["admitted", "placed", "failed", "placed"]
    assert (exporter.spans, span.status) == ([span], "unavailable")


async def test_without_trace_nothing_is_sent(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    await run(router, make_request())
    assert not decode.state.requests[0].trace_context


async def test_tokens_cost_no_call_whether_a_request_is_traced_or_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster([], [decode])
    calls: list[str] = []

    def counted(name: str) -> None:
        method = getattr(Span, name)
        monkeypatch.setattr(Span, name, lambda *args, **kwargs: (calls.append(name), method(*args, **kwargs))[1])

    for name in ("event", "end", "part", "__init__"):
        counted(name)
    found = []
    for span in (UNTRACED, Span("request", None, MemoryExporter())):
        for length in (1, 64):
            calls.clear()
            await run(router, replace(make_request(max_tokens=length), span=span))
            found.append(list(calls))
    assert found[0] == found[1] == found[2] == found[3] == ["event", "event", "event", "end"]


def test_the_header_names_the_parent() -> None:
    body = {"model": "baton-tiny", "prompt": "def", "max_tokens": 2}
    with Served() as api:
        for header in (PARENT, "nonsense"):
            answer = api.post("/v1/completions", body, headers={"traceparent": header})
            assert answer.status_code == 200, answer.text
        first, second = (request.span.parent for request in api.dispatcher.requests)
    assert (str(first), second) == (PARENT, None)
