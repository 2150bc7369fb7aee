"""The lines of a batch: read from its input file, checked, and their results as OpenAI writes them."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
import orjson

from baton.errors import InvalidRequestError, shown
from baton_router.frontend.batches.schemas import BatchUsage
from baton_router.frontend.batches.store import BatchStore, LineResult, read_content

MAX_ID_CHARS = 512
_FIELDS = 4096
"""Bytes of a line beside its body."""


class BatchLine(msgspec.Struct):
    """A line of an input file.

    Attributes:
        custom_id: The client's name of it; unique in the file.
        method: HTTP method.
        url: Path of the endpoint.
        body: Body of the request, as JSON.
    """

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Name(msgspec.Struct):
    custom_id: Any = None


class _Stream(msgspec.Struct):
    stream: Any = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """Usage in an answer: completions count ``prompt_tokens``, responses ``input_tokens``."""

    prompt_tokens: int = 0
    input_tokens: int = 0
    completion_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body


class _Answered(msgspec.Struct):
    response: _Response


_LINE = msgspec.json.Decoder(BatchLine)
_ANSWERED = msgspec.json.Decoder(_Answered)
_NAME = msgspec.json.Decoder(_Name)
_STREAM = msgspec.json.Decoder(_Stream)


_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
"""What the decoder raises for bytes that are no JSON, no UTF-8, or nested too deep."""


class NumberedLine(NamedTuple):
    """A line that is not empty, and its number in the file, from 1 on. ``None``: it is too long."""

    number: int
    data: bytes | None


async def read_lines(store: BatchStore, file_id: str, max_body_bytes: int) -> AsyncIterator[NumberedLine]:
    """Iterate over the lines of a file that are not empty.

    Args:
        store: Store of the file.
        file_id: Identifier of the file.
        max_body_bytes: Longest body of a request, in bytes.
    """
    limit = max_body_bytes + _FIELDS
    number = 0
    rest = b""
    too_long = False
    async for piece in read_content(store, file_id):
        await asyncio.sleep(0)  # what is done with the lines of several pieces would hold up the event loop
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            number += 1
            if too_long or len(line) > limit:
                yield NumberedLine(number, None)
                too_long = False
            elif line.strip():
                yield NumberedLine(number, line)
        if len(rest) > limit:
            rest, too_long = b"", True
    if too_long:
        yield NumberedLine(number + 1, None)
    elif rest.strip():
        yield NumberedLine(number + 1, rest)


def custom_id_of(line: NumberedLine) -> str | None:
    """Return the name of a line; ``None``: it is no JSON object, or too long to be read.

    Raises:
        InvalidRequestError: The line has no valid ``custom_id``.
    """
    if line.data is None:
        return None
    try:
        ident = _NAME.decode(line.data).custom_id
    except _UNREADABLE:
        return None
    if not (isinstance(ident, str) and 0 < len(ident) <= MAX_ID_CHARS):
        message = f"line {line.number}: custom_id must be a string of 1 to {MAX_ID_CHARS} characters"
        raise InvalidRequestError(message, field="custom_id")
    return ident


def parse_line(line: NumberedLine, endpoint: str, max_body_bytes: int) -> BatchLine:
    """Return a line, checked but for the body, which its endpoint checks.

    Raises:
        InvalidRequestError: Says which line, and names the field.
    """
    number = line.number
    if line.data is None or len(line.data) > max_body_bytes + _FIELDS:
        raise InvalidRequestError(f"line {number}: the body must be at most {max_body_bytes} bytes", field="body")
    try:
        parsed = _LINE.decode(line.data)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"line {number}: {error}") from error
    except _UNREADABLE as error:
        raise InvalidRequestError(f"line {number} is not valid JSON: {error}") from error
    if parsed.method != "POST":
        raise InvalidRequestError(f"line {number}: method must be POST, got {shown(parsed.method)}", field="method")
    if parsed.url != endpoint:
        message = f"line {number}: url must be the batch's endpoint {endpoint}, got {shown(parsed.url)}"
        raise InvalidRequestError(message, field="url")
    if bytes(memoryview(parsed.body)[:1]) != b"{":
        raise InvalidRequestError(f"line {number}: body must be an object", field="body")
    if _STREAM.decode(parsed.body).stream not in (None, False):
        raise InvalidRequestError(f"line {number}: answers to a batch are not streamed", field="body.stream")
    return parsed


def answered_line(number: int, custom_id: str, status: int, request_id: str, body: bytes) -> LineResult:
    """Return the result of a line that its endpoint has answered.

    Args:
        number: Number of the line.
        custom_id: Name of the line.
        status: HTTP status of the answer.
        request_id: Identifier of the request.
        body: Body of the answer, as JSON.
    """
    response = b'{"status_code":%d,"request_id":%b,"body":%b}' % (status, orjson.dumps(request_id), body)
    return _result(number, custom_id, response, b"null", failed=status >= 400)


def unsent_line(line: NumberedLine, code: str, message: str, param: str | None = None) -> LineResult:
    """Return the result of a line that was not sent.

    Args:
        line: The line.
        code: Code of the error.
        message: Message of the error.
        param: Field that is wrong; ``None``: none.
    """
    try:
        custom_id = custom_id_of(line)
    except InvalidRequestError:
        custom_id = None
    error = orjson.dumps({"code": code, "message": message, "param": param, "line": line.number})
    return _result(line.number, custom_id, b"null", error, failed=True)


async def sum_usage(store: BatchStore, output_id: str) -> BatchUsage:
    """Return the tokens of all answers in an output file, as the answers themselves state them."""
    total = BatchUsage()
    async for line in read_lines(store, output_id, sys.maxsize):
        usage = _ANSWERED.decode(line.data or b"").response.body.usage
        if usage is None:
            continue
        total.input_tokens += usage.prompt_tokens + usage.input_tokens
        total.output_tokens += usage.completion_tokens + usage.output_tokens
        for details in (usage.prompt_tokens_details, usage.input_tokens_details):
            total.input_tokens_details.cached_tokens += details.cached_tokens if details else 0
        for details in (usage.completion_tokens_details, usage.output_tokens_details):
            total.output_tokens_details.reasoning_tokens += details.reasoning_tokens if details else 0
    total.total_tokens = total.input_tokens + total.output_tokens
    return total


def _result(number: int, custom_id: str | None, response: bytes, error: bytes, *, failed: bool) -> LineResult:
    ident = b"batch_req_" + secrets.token_hex(12).encode()
    name = orjson.dumps(custom_id)
    line = b'{"id":"%b","custom_id":%b,"response":%b,"error":%b}\n' % (ident, name, response, error)
    return LineResult(number, failed, line)
