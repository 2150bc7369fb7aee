"""``/openapi.json`` is valid, names every endpoint, and is true: of real answers, and to a fuzzer."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import validate
from tests.support.servers.http_front import CHAT, Served
from tests.support.watched import KEY, Watched, watched_router

from baton_router.frontend.document import OPEN_PATHS, openapi
from baton_router.frontend.openai.schemas import ONLY_DEFAULT, ChatBody, CompletionBody


@pytest.fixture(scope="module")
def api() -> Iterator[Served]:
    with Served() as served:
        yield served


def check(document: dict[str, Any], name: str, value: Any) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


@pytest.mark.parametrize("keyed", [False, True])
def test_it_is_valid(keyed: bool) -> None:
    document = openapi(keyed=keyed, metrics_port=9464)
    assert document["openapi"].startswith("3.1")
    validate(document)
    for path, operations in document["paths"].items():
        for operation in (operations[method] for method in ("get", "post", "delete") if method in operations):
            keys = [{"ApiKey": []}, {"ApiKeyHeader": []}]
            assert operation["security"] == (keys if keyed and path not in OPEN_PATHS else [])
            error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
            for status in ("400", "500", "503") if path != "/readyz" else ("400", "500"):
                content = operation["responses"][status]["content"]["application/json"]
                assert content["schema"] == {"$ref": f"#/components/schemas/{error}"}
            assert ("401" in operation["responses"]) is bool(operation["security"])
    assert ("securitySchemes" in document["components"]) is keyed
    assert [server["url"] for server in document["paths"]["/metrics"]["servers"]] == ["/", "http://{host}:9464"]
    assert "servers" not in openapi(keyed=keyed)["paths"]["/metrics"]


def test_every_field_has_a_type_or_says_what_it_takes() -> None:
    schemas = openapi(keyed=False)["components"]["schemas"]
    for body in (ChatBody, CompletionBody):
        properties = schemas[body.__name__]["properties"]
        assert {*body.__struct_fields__, *ONLY_DEFAULT} <= set(properties)
        for name, schema in properties.items():
            assert {"type", "anyOf", "enum", "description"} & set(schema), name
    assert schemas["ChatBody"]["required"] == ["messages"]
    assert schemas["CompletionBody"]["required"] == ["prompt"]
    assert {"type": "integer", "minimum": 1, "maximum": 128} in schemas["ChatBody"]["properties"]["n"]["anyOf"]
    check(openapi(keyed=False), "ChatBody", {"messages": CHAT, "stop": ["x"], "tools": []})
    for wrong in ({"messages": []}, {"messages": [{"role": "wizard", "content": "x"}]}, {"messages": CHAT, "n": 0}):
        with pytest.raises(jsonschema.ValidationError):
            check(openapi(keyed=False), "ChatBody", wrong)


def events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


@pytest.mark.parametrize("more", [{}, {"logprobs": 2, "n": 2, "return_token_ids": True}, {"echo": True, "logprobs": 1}])
def test_completions_are_as_it_says(api: Served, more: dict[str, Any]) -> None:
    api.reset()
    document, body = api.http.get("/openapi.json").json(), {"prompt": "def", **more}
    whole = api.post("/v1/completions", {**body, "prompt_logprobs": 1}).json()
    check(document, "Completion", whole)
    stream = api.post("/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}).text
    assert len(events(stream)) > 3
    for event in events(stream):
        check(document, "CompletionChunk", event)


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2, "n": 2, "return_token_ids": True}])
def test_chat_answers_are_as_it_says(api: Served, more: dict[str, Any]) -> None:
    api.reset()
    document, body = api.http.get("/openapi.json").json(), {"messages": CHAT, **more}
    check(document, "ChatCompletion", api.post("/v1/chat/completions", {**body, "prompt_logprobs": 1}).json())
    stream = api.post("/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}).text
    assert len(events(stream)) > 3
    for event in events(stream):
        check(document, "ChatCompletionChunk", event)
    with pytest.raises(jsonschema.ValidationError):
        check(document, "ChatCompletionChunk", {**event, "object": "other"})


def test_responses_and_messages_are_as_it_says(api: Served) -> None:
    api.reset()
    document = api.http.get("/openapi.json").json()
    answer = api.post("/v1/responses", {"input": "Hi", "max_output_tokens": 20}).json()
    check(document, "Response", answer)
    check(document, "Response", api.http.get(f"/v1/responses/{answer['id']}").json())
    check(document, "DeletedResponse", api.http.delete(f"/v1/responses/{answer['id']}").json())
    body = {"messages": CHAT, "max_tokens": 20}
    check(document, "Message", api.post("/v1/messages", body).json())
    check(document, "TokenCount", api.post("/v1/messages/count_tokens", {"messages": CHAT}).json())
    check(document, "AnthropicError", api.post("/v1/messages", {}).json())
    for path, fields, name in (
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 20}, "ResponseEvent"),
        ("/v1/messages", body, "MessageEvent"),
    ):
        text = api.post(path, {**fields, "stream": True}).text
        told = [json.loads(part.partition("\ndata: ")[2]) for part in text.strip().split("\n\n")]
        assert len(told) > 5
        for event in told:
            check(document, name, event)
    for name, wrong in (("MessagesBody", {"messages": CHAT}), ("ResponsesBody", {"input": "x", "background": True})):
        with pytest.raises(jsonschema.ValidationError):
            check(document, name, wrong)
    assert "[DONE]" not in json.dumps(document["paths"]["/v1/messages"])
    assert "[DONE]" in json.dumps(document["paths"]["/v1/chat/completions"])


def test_a_request_to_no_endpoint_is_told_which_there_are(api: Served) -> None:
    answer = api.http.post("/v1/embeddings", json={})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 404
    assert "/v1/embeddings" in message
    assert "POST /v1/chat/completions" in message
    assert "GET /v1/models/{model}" in message


def routes(watched: Watched) -> set[str]:
    app: Any = watched.app._http.config.app
    return {route.path.replace(":path}", "}") for route in app.routes} - {"/console/{name}"}


async def test_it_names_every_endpoint_and_a_fuzzer_finds_nothing(tmp_path: Path) -> None:
    async with watched_router(tmp_path, max_model_len=64) as watched:
        document = (await watched.http.get("/openapi.json")).json()
        assert routes(watched) == set(document["paths"])
        fuzzer = await asyncio.create_subprocess_exec(
            *(str(Path(sys.executable).parent / "st"), "run", f"{watched.url}/openapi.json"),
            *(
                "--header",
                f"Authorization: Bearer {KEY}",
                "--phases",
                "coverage,fuzzing",
                "--max-examples",
                "5",
                "--request-timeout",
                "240",
            ),
            *("--generation-deterministic", "--no-color"),
            # What one field means for another one is said by errors that name the field, not by schemas.
            *("--exclude-checks", "positive_data_acceptance"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await fuzzer.communicate()
        assert fuzzer.returncode == 0, output.decode()
        tested = re.search(rb"Tested: (\d+)", output)
        assert tested is not None
        assert int(tested[1]) > 20


async def test_the_documentation_page_is_all_here_and_open(tmp_path: Path) -> None:
    async with watched_router(tmp_path) as watched:
        del watched.http.headers["authorization"]
        page = await watched.http.get("/docs")
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for text in (page.text, (await watched.http.get("/console/docs.js")).text):
            assert "//" not in text.replace("// ", "")  # nothing from elsewhere
        for name in ("docs.js", "docs.css", "dom.js", "theme.css", "mark.svg"):
            assert (await watched.http.get(f"/console/{name}")).status_code == 200
        assert (await watched.http.get("/openapi.json")).json()["paths"]
        assert (await watched.http.get("/v1/models")).status_code == 401
