"""``/openapi.json``: all endpoints of the client port, made from the schemas that requests are parsed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import msgspec

from baton.version import __version__
from baton_router.frontend.anthropic import schemas as messages
from baton_router.frontend.batches import schemas as batches
from baton_router.frontend.openai import answer_schemas as answers
from baton_router.frontend.openai.responses import ResponsesBody
from baton_router.frontend.openai.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    json_schemas,
)

Schema = dict[str, Any]
_JSON = "application/json"
_FORM = "multipart/form-data"
_EVENTS = "text/event-stream"
_HTML = "text/html; charset=utf-8"
_ANY: Final = (400, 403, 414, 417, 431, 500, 501, 503, 505)
"""Error statuses that any request may get: unsupported HTTP, foreign hosts, a full router."""
_BODY: Final = (404, 408, 413, 415, 429)
_GENERATES: Final = (409, 502, 504)
_OBJECT: Schema = {"type": "object"}
_SCHEME = "ApiKey"
_KEY_SCHEME = "ApiKeyHeader"


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint of the document.

    Attributes:
        summary: One line of description.
        answer: Successful response: a struct, a schema, or a media type.
        body: Schema of the request body; ``None`` without JSON body.
        form: Schema of a ``multipart/form-data`` body; empty: it has none.
        event: Struct of the events of a streamed answer; ``None`` if it cannot be streamed.
        ends: Data of the event that ends a stream; empty if it is an ordinary event.
        error: Struct of error responses.
        errors: Error statuses beside those that any request may get.
        open: Whether no API key is needed.
        parameters: Path and query parameters, in OpenAPI's format.
        statuses: More statuses with the same kind of response.
    """

    summary: str
    answer: type[msgspec.Struct] | Schema | str
    body: type[Body] | None = None
    form: Schema = field(default_factory=dict)
    event: type[msgspec.Struct] | None = None
    ends: str = ""
    error: type[msgspec.Struct] = answers.Error
    errors: tuple[int, ...] = ()
    open: bool = False
    parameters: tuple[Schema, ...] = ()
    statuses: tuple[int, ...] = ()


def _parameter(place: str, name: str, description: str, **schema: Any) -> Schema:
    return {
        "name": name,
        "in": place,
        "required": place == "path",
        "description": description,
        "schema": schema or {"type": "string"},
    }


_KEEPS: Final = (408, 413, 429)
_FILE_ID = _parameter("path", "file_id", "Its id.", type="string", minLength=1)
_BATCH_ID = _parameter("path", "batch_id", "Its id.", type="string", minLength=1)
OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a conversation.",
        answers.ChatCompletion,
        ChatBody,
        event=answers.ChatCompletionChunk,
        ends="[DONE]",
        errors=(*_BODY, *_GENERATES),
    ),
    ("POST", "/v1/completions"): Operation(
        "Go on with prompts.",
        answers.Completion,
        CompletionBody,
        event=answers.CompletionChunk,
        ends="[DONE]",
        errors=(*_BODY, *_GENERATES),
    ),
    ("POST", "/v1/responses"): Operation(
        "Answer an input, and keep the conversation for the next one.",
        answers.Response,
        ResponsesBody,
        event=answers.ResponseEvent,
        errors=(*_BODY, *_GENERATES),
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        "Count the tokens of an input.", answers.InputTokens, ResponsesBody, errors=_BODY
    ),
    ("GET", "/v1/responses/{response_id}"): Operation(
        "Return a response that was kept.",
        answers.Response,
        errors=(404,),
        parameters=(
            _parameter("path", "response_id", "Its id.", type="string", minLength=1),
            _parameter("query", "stream", "Only false: it comes in one piece.", enum=["false", "0"]),
        ),
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(
        "List the items of a response's input.",
        answers.InputItems,
        errors=(404,),
        parameters=(
            _parameter("path", "response_id", "Its id.", type="string", minLength=1),
            _parameter("query", "order", "Of the items; default: desc.", enum=["asc", "desc"]),
            _parameter("query", "limit", "Most items; default: 20.", type="integer", minimum=1, maximum=100),
            _parameter("query", "after", "Id of the item before the first one.", type="string"),
        ),
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(
        "Cancel a response of the background: there are none.",
        answers.Response,
        errors=(400, 404),
        parameters=(_parameter("path", "response_id", "Its id.", type="string", minLength=1),),
    ),
    ("DELETE", "/v1/responses/{response_id}"): Operation(
        "Forget a response.",
        answers.DeletedResponse,
        errors=(404,),
        parameters=(_parameter("path", "response_id", "Its id.", type="string", minLength=1),),
    ),
    ("POST", "/v1/files"): Operation(
        "Keep a file with the lines of a batch.",
        batches.File,
        form=batches.UPLOAD_FORM,
        errors=_KEEPS,
    ),
    ("GET", "/v1/files"): Operation(
        "List files.",
        batches.FileList,
        errors=(404,),
        parameters=(
            _parameter("query", "purpose", "Only files of it: batch or batch_output.", type="string"),
            _parameter("query", "order", "By time of creation; default: desc.", enum=["asc", "desc"]),
            _parameter("query", "limit", "Most files; default: 10000.", type="integer", minimum=1, maximum=10_000),
            _parameter("query", "after", "Id of the file before the first one.", type="string"),
        ),
    ),
    ("GET", "/v1/files/{file_id}"): Operation("Describe a file.", batches.File, errors=(404,), parameters=(_FILE_ID,)),
    ("GET", "/v1/files/{file_id}/content"): Operation(
        "Return the content of a file.", "application/jsonl", errors=(404,), parameters=(_FILE_ID,)
    ),
    ("DELETE", "/v1/files/{file_id}"): Operation(
        "Remove a file; 409 while a batch reads it.",
        batches.DeletedFile,
        errors=(404, 409),
        parameters=(_FILE_ID,),
    ),
    ("POST", "/v1/batches"): Operation(
        "Answer the lines of a file in idle capacity.", batches.Batch, batches.CreateBatchBody, errors=_BODY
    ),
    ("GET", "/v1/batches"): Operation(
        "List batches, newest first.",
        batches.BatchList,
        errors=(404,),
        parameters=(
            _parameter("query", "limit", "Most batches; default: 20.", type="integer", minimum=1, maximum=100),
            _parameter("query", "after", "Id of the batch before the first one.", type="string"),
        ),
    ),
    ("GET", "/v1/batches/{batch_id}"): Operation(
        "Describe a batch.", batches.Batch, errors=(404,), parameters=(_BATCH_ID,)
    ),
    ("POST", "/v1/batches/{batch_id}/cancel"): Operation(
        "Cancel a batch; 409 if it has ended.",
        batches.Batch,
        errors=(404, 409),
        parameters=(_BATCH_ID,),
    ),
    ("POST", "/v1/messages"): Operation(
        "Answer a conversation, as Anthropic's Messages.",
        messages.Message,
        messages.MessagesBody,
        event=messages.MessageEvent,
        error=messages.AnthropicError,
        errors=(*_BODY, *_GENERATES),
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Count the tokens of a conversation.",
        messages.TokenCount,
        messages.CountTokensBody,
        error=messages.AnthropicError,
        errors=_BODY,
    ),
    ("GET", "/v1/models"): Operation("List the models that are served.", answers.ModelList),
    ("GET", "/v1/models/{model}"): Operation(
        "Describe a model.",
        answers.Model,
        errors=(404,),
        parameters=(_parameter("path", "model", "Its name; may have slashes.", type="string", minLength=1),),
    ),
    ("POST", "/tokenize"): Operation("Turn text into token ids.", answers.Tokens, TokenizeBody, errors=_BODY),
    ("POST", "/detokenize"): Operation("Turn token ids into text.", answers.Prompt, DetokenizeBody, errors=_BODY),
    ("GET", "/health"): Operation("Say that the process is up.", answers.Health, open=True),
    ("GET", "/readyz"): Operation(
        "Say whether requests can be served: 503 if not.", answers.Readiness, open=True, statuses=(503,)
    ),
    ("GET", "/version"): Operation("Say which version this is.", answers.Version, open=True),
    ("GET", "/metrics"): Operation(
        "Metrics for Prometheus, as text or OpenMetrics; with API keys for administrators, and without on a port of "
        "its own (--metrics-port).",
        "text/plain",
    ),
    ("POST", "/reset_prefix_cache"): Operation(
        "Have every instance drop the cached blocks that no request uses; for administrators.", answers.CacheReset
    ),
    ("POST", "/flush_cache"): Operation("As /reset_prefix_cache, under SGLang's name.", answers.CacheReset),
    ("GET", "/tokenizer_info"): Operation(
        "Return the model's tokenizer configuration and chat template; for administrators.", answers.TokenizerInfo
    ),
    ("GET", "/docs"): Operation("Show this document as a page.", _HTML, open=True),
    ("GET", "/openapi.json"): Operation("Return this document.", _OBJECT, open=True),
    ("GET", "/"): Operation("Lead browsers to /console.", _HTML, errors=(404,), open=True),
    ("GET", "/console"): Operation("Show a page that watches the deployment.", _HTML, open=True),
    ("GET", "/debug/decisions"): Operation(
        "List the latest placement decisions, newest first.",
        answers.Decisions,
        parameters=(
            _parameter("query", "limit", "How many.", type="integer", minimum=1, maximum=500, default=50),
            _parameter("query", "id", "A part of the request's id."),
        ),
    ),
    ("GET", "/debug/decisions/{request_id}"): Operation(
        "Explain a placement decision.",
        _OBJECT,
        errors=(404,),
        parameters=(_parameter("path", "request_id", "The answer's id, or x-request-id.", type="string", minLength=1),),
    ),
    ("GET", "/debug/index"): Operation("Say how far the index can be trusted; for administrators.", _OBJECT),
    ("GET", "/debug/replicas"): Operation("Say how other routers stand; for administrators.", _OBJECT),
    ("GET", "/debug/console"): Operation("Return what the console shows; for administrators.", _OBJECT),
}
OPEN_PATHS: Final = frozenset(path for (_, path), operation in OPERATIONS.items() if operation.open)


def openapi(*, keyed: bool, metrics_port: int = 0) -> Schema:
    """Return the OpenAPI 3.1 document.

    Args:
        keyed: Whether clients must show API keys.
        metrics_port: Where ``/metrics`` is served without them too; 0: nowhere.
    """
    paths: Schema = {}
    for (method, path), operation in OPERATIONS.items():
        name = f"{method.lower()}{path}".translate(str.maketrans("/.{}", "__  ")).replace(" ", "")
        paths.setdefault(path, {})[method.lower()] = _operation(operation, name, keyed)
    if metrics_port:
        server = {"url": f"http://{{host}}:{metrics_port}", "variables": {"host": {"default": "localhost"}}}
        paths["/metrics"]["servers"] = [{"url": "/"}, {**server, "description": "Without API keys"}]
    structs: list[type[msgspec.Struct]] = [answers.Error, messages.AnthropicError]
    for operation in OPERATIONS.values():
        structs += [x for x in (operation.body, operation.event) if x is not None]
        if isinstance(operation.answer, type):
            structs.append(operation.answer)
    components: Schema = {"schemas": json_schemas(structs)}
    if keyed:
        components["securitySchemes"] = {
            _SCHEME: {"type": "http", "scheme": "bearer"},
            _KEY_SCHEME: {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": __version__,
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": components,
    }


def _operation(operation: Operation, name: str, keyed: bool) -> Schema:
    content = _content(operation)
    errors = {*_ANY, *operation.errors, *({401} if keyed and not operation.open else ())}
    responses: Schema = {str(status): _error(status, operation.error) for status in sorted(errors)}
    for status in (200, *operation.statuses):
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": content}
    for status in operation.statuses:  # by the router itself: full
        responses[str(status)]["content"] = {
            _JSON: {"schema": {"anyOf": [content[_JSON]["schema"], _ref(answers.Error)]}}
        }
    document: Schema = {
        "operationId": name,
        "summary": operation.summary,
        "security": [{_SCHEME: []}, {_KEY_SCHEME: []}] if keyed and not operation.open else [],
        "responses": dict(sorted(responses.items())),
    }
    if operation.parameters:
        document["parameters"] = [*operation.parameters]
    if operation.form:
        document["requestBody"] = {"required": True, "content": {_FORM: {"schema": operation.form}}}
    if operation.body is not None:
        document["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(operation.body)}}}
    return document


def _content(operation: Operation) -> Schema:
    answer = operation.answer
    if isinstance(answer, str):
        content: Schema = {answer: {"schema": {"type": "string"}}}
        if answer == "text/plain":
            content["application/openmetrics-text"] = {"schema": {"type": "string"}}
        return content
    content = {_JSON: {"schema": answer if isinstance(answer, dict) else _ref(answer)}}
    if operation.event is not None:
        event = {"contentMediaType": _JSON, "contentSchema": {"anyOf": [_ref(operation.event), _ref(operation.error)]}}
        data: Schema = {"type": "string", "anyOf": [event, *([{"const": operation.ends}] if operation.ends else [])]}
        last = f" An event; the last one's data is {operation.ends}, unless it is an error." if operation.ends else ""
        content[_EVENTS] = {
            "schema": {
                "type": "object",
                "description": f"With stream: true.{last}",
                "properties": {"data": data},
                "required": ["data"],
            },
        }
    return content


def _error(status: int, error: type[msgspec.Struct]) -> Schema:
    return {"description": HTTPStatus(status).phrase, "content": {_JSON: {"schema": _ref(error)}}}


def _ref(struct: type[msgspec.Struct]) -> Schema:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}
