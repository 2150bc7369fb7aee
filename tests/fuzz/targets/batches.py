"""Files of batches: the form that they come in, and their lines."""

from __future__ import annotations

import orjson

from baton.errors import InvalidRequestError
from baton_router.frontend.batches.lines import NumberedLine, custom_id_of, parse_line, unsent_line
from baton_router.frontend.batches.multipart import FormPart, MultipartParser, boundary_of

_LIMIT = 1000


def forms(data: bytes) -> None:
    """A form is split into the same parts however it arrives, or refused."""
    try:
        boundary_of(data[:80].decode("latin-1"))
    except InvalidRequestError as error:
        _check(error.field == "file")
    found = [_split(data, size) for size in (1, 7, len(data) or 1)]
    assert found[0] == found[1] == found[2]


def _split(data: bytes, size: int) -> list[tuple[FormPart, bytes]] | None:
    parser = MultipartParser(b"B")
    parts: list[tuple[FormPart, bytes]] = []
    try:
        for at in range(0, len(data), size):
            for event in parser.feed(data[at : at + size]):
                if isinstance(event, FormPart):
                    parts.append((event, b""))
                else:
                    parts[-1] = (parts[-1][0], parts[-1][1] + event)
    except InvalidRequestError as error:
        _check(error.field == "file")
    return parts if parser.done else None


def _check(holds: bool) -> None:
    assert holds


def batch_lines(data: bytes) -> None:
    """A line is a request, or an error that says which line; its result is a line of JSON."""
    line = NumberedLine(7, data.replace(b"\n", b" "))
    try:
        custom_id_of(line)
        assert parse_line(line, "/v1/completions", _LIMIT).custom_id
    except InvalidRequestError as error:
        _check("line 7" in error.message)
    result = unsent_line(line, "code", "message")
    assert result.data.endswith(b"\n")
    assert result.data.count(b"\n") == 1
    assert orjson.loads(result.data)["error"]["line"] == 7
