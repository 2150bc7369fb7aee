"""A session's name on its way from HTTP header, HTTP field and gRPC to the policy that keeps it in one place."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from tests.support.grpc_calls import Context, servicer
from tests.support.router.world import World, make_request, run
from tests.support.scripted import ScriptedDispatcher
from tests.support.servers.http_front import Served

from baton.api.v1 import router_pb2
from baton.client.request import build_generate
from baton.tokenizer import TextModelCache
from baton.types import PrefillPath
from baton_router.accounts import Accounts
from baton_router.processor.input_processor import InputProcessor
from baton_router.processor.output_processor import GenerationMetrics


@pytest.fixture
def dispatcher() -> ScriptedDispatcher:
    return ScriptedDispatcher()


@pytest.fixture
def pipeline(dispatcher: ScriptedDispatcher) -> InputProcessor:
    return InputProcessor(dispatcher, TextModelCache(), GenerationMetrics(CollectorRegistry()))


def test_header_and_field_name_the_session() -> None:
    body = {"model": "baton-tiny", "prompt": "def", "max_tokens": 2}
    with Served() as api:
        for extra, headers in (({}, {}), ({"session_id": "a"}, {}), ({"session_id": "a"}, {"x-baton-session": "b"})):
            answer = api.post("/v1/completions", {**body, **extra}, headers=headers)
            assert answer.status_code == 200, answer.text
            assert "x-baton-ignored-fields" not in answer.headers
        long = api.post("/v1/completions", {**body, "session_id": "x" * 600})
        assert (long.status_code, long.json()["error"]["param"]) == (400, "session_id")
        assert [request.session for request in api.dispatcher.requests] == ["", "a", "b"]


@pytest.mark.parametrize(
    ("body", "headers", "session"),
    [
        ({"prompt_cache_key": "key"}, {}, "key"),
        ({"prompt_cache_key": "key"}, {"x-session-affinity": "own"}, "own"),
        ({"prompt_cache_key": "key", "session_id": "a"}, {"session-id": "own"}, "a"),
        ({}, {"x-session-id": "late", "session_id": "codex", "x-claude-code-session-id": "claude"}, "claude"),
        ({}, {"x-session-id": "late", "session-id": "codex", "x-baton-session": "b"}, "b"),
        ({"prompt_cache_key": "x" * 600}, {}, ""),
    ],
)
def test_agents_name_the_session_in_their_own_ways(body: dict[str, str], headers: dict[str, str], session: str) -> None:
    with Served() as api:
        chat = {"model": "baton-tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        completion = {"model": "baton-tiny", "prompt": "def", "max_tokens": 2}
        response = {"model": "baton-tiny", "input": "def", "max_output_tokens": 2}
        paths = {"/v1/completions": completion, "/v1/chat/completions": chat}
        if "session_id" not in body:
            paths["/v1/responses"] = response
        for path, fields in paths.items():
            answer = api.post(path, {**fields, **body}, headers=headers)
            assert answer.status_code == 200, answer.text
            assert "x-baton-ignored-fields" not in answer.headers
        assert [request.session for request in api.dispatcher.requests] == [session] * len(paths)


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ('{"device_id": "d", "account_uuid": "", "session_id": "s-1"}', "s-1"),
        ("user_abc_account__session_s-2", "s-2"),
        ("user-7", ""),
        ('{"session_id": 5}', ""),
        ("{broken", ""),
    ],
)
def test_claude_code_names_the_session_in_its_user_id(user_id: str, session: str) -> None:
    message = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "metadata": {"user_id": user_id}}
    with Served() as api:
        answer = api.post("/v1/messages", {"model": "baton-tiny", **message})
        assert answer.status_code == 200, answer.text
        assert [request.session for request in api.dispatcher.requests] == [session]


async def test_a_grpc_request_names_the_session(dispatcher: ScriptedDispatcher, pipeline: InputProcessor) -> None:
    request = build_generate("def", "", {"session_id": "c", "max_tokens": 2})
    responses = [response async for response in servicer(pipeline).Generate(request, Context())]
    assert dispatcher.requests[0].session == "c"
    decision = responses[0].decision
    assert {term.name: term.value for term in decision.terms} == {"match": 1.0}
    answer = await servicer(pipeline).Route(router_pb2.RouteRequest(text="def", session_id="c"), Context())
    assert answer.decision.decode_instance == "decode-1"


async def test_sessions_of_tenants_are_apart(dispatcher: ScriptedDispatcher, pipeline: InputProcessor) -> None:
    accounts = Accounts.of_keys("one", "two")
    request = build_generate("def", "", {"session_id": "c", "max_tokens": 2})
    for key in ("one", "two", "one"):
        async for _ in servicer(pipeline, accounts).Generate(request, Context(key)):
            pass
    first, other, again = (request.session for request in dispatcher.requests)
    assert first == again != other


HOUR = {"type": "ephemeral", "ttl": "1h"}


@pytest.mark.parametrize(
    ("path", "body", "headers", "retention_s", "clipped"),
    [
        ("completions", {"prompt": "def"}, {}, 0.0, None),
        ("completions", {"prompt": "def", "prompt_cache_retention": "in_memory"}, {}, 0.0, None),
        ("completions", {"prompt": "def", "prompt_cache_retention": "24h"}, {}, 3600.0, "prompt_cache_retention"),
        ("responses", {"input": "def", "prompt_cache_retention": "1h"}, {}, 3600.0, None),
        ("completions", {"prompt": "def"}, {"x-dynamo-session-final": "true"}, -1.0, None),
        ("completions", {"prompt": "def"}, {"x-dynamo-session-final": "false"}, 0.0, None),
        ("messages", {"cache_control": HOUR}, {}, 3600.0, None),
        ("messages", {"system": [{"type": "text", "text": "s", "cache_control": HOUR}]}, {}, 3600.0, None),
        ("messages", {"cache_control": {"type": "ephemeral"}}, {}, 0.0, None),
    ],
)
def test_hints_for_the_cache_are_bounded_and_what_is_clipped_is_said(
    path: str, body: dict[str, object], headers: dict[str, str], retention_s: float, clipped: str | None
) -> None:
    more: dict[str, object] = {} if path == "responses" else {"max_tokens": 2}
    if path == "messages":
        more["messages"] = [{"role": "user", "content": "a"}]
    with Served() as api:
        answer = api.post(f"/v1/{path}", {"model": "baton-tiny", **more, **body}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-baton-clipped") == clipped
        assert "x-baton-ignored-fields" not in answer.headers
        assert [request.retention_s for request in api.dispatcher.requests] == [retention_s]


def test_a_retention_that_does_not_exist_is_refused() -> None:
    with Served() as api:
        body = {"model": "baton-tiny", "prompt": "def", "prompt_cache_retention": "forever"}
        answer = api.post("/v1/completions", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_cache_retention")


# --- over the wire, to fake workers ---


async def test_a_session_stays_on_its_instances_and_moves_when_they_are_gone(world: World) -> None:
    decodes = await world.decodes(4)
    router = await world.cluster(await world.prefills(2), decodes, policy="session")
    for name in ("a", "b"):
        for number in range(6):
            await run(router, replace(make_request(f"{name}{number}", [number] * 40), session=name))
    ran = {name: [w for w in decodes for r in w.state.requests if r.request_id.startswith(name)] for name in "ab"}
    homes = {name: set(map(id, there)) for name, there in ran.items()}
    assert [len(there) for there in homes.values()] == [1, 1]
    home = ran["a"][0]
    await home.stop()
    answer = await run(router, replace(make_request("a-later"), session="a"))
    assert answer.trace.decode_instance != home.instance_id
    router.assert_nothing_held()


async def test_a_choice_by_cost_reaches_decode_and_what_it_reports_is_learnt(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster(await world.prefills(2), [decode], policy="cost_ms")
    for number in range(4):
        answer = await run(router, make_request(f"r{number}", [number] * 40))
        decision = answer.chunks[0].decision
        assert decision is not None
        threshold = decode.state.requests[-1].remote_prefill_threshold
        assert threshold == (1 if decision.path is PrefillPath.REMOTE else 2**31 - 1)
        assert sum(term.value for term in decision.terms) == pytest.approx(decision.score)
    speeds = router.dispatcher._placer._speeds
    assert speeds is not None
    assert speeds.output_tokens == pytest.approx(8.0), "every request generated eight tokens"
    router.assert_nothing_held()


async def test_instances_get_a_key_of_the_session_and_not_its_name(world: World) -> None:
    (decode,) = await world.decodes(1)
    router = await world.cluster(await world.prefills(1), [decode])
    for name in ("", "private name", "private name", "other"):
        await run(router, replace(make_request(f"r{len(decode.state.requests)}"), session=name, retention_s=60.0))
    none, first, again, other = (request.session_key for request in decode.state.requests)
    assert none == b""
    assert first == again != other
    assert [request.retention_s for request in decode.state.requests] == [0.0, 60.0, 60.0, 60.0]
    assert {len(first), len(other)} == {8}
    assert b"private" not in decode.state.requests[1].SerializeToString()
