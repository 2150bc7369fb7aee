"""Lines of batches, the form that a file comes in, and how idle capacity is granted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequestError
from baton_router.frontend.batches.lines import (
    NumberedLine,
    answered_line,
    custom_id_of,
    parse_line,
    read_lines,
    unsent_line,
)
from baton_router.frontend.batches.multipart import FormPart, MultipartParser, boundary_of
from baton_router.frontend.batches.sqlite_store import SqliteBatchStore

CHAT = "/v1/chat/completions"
GOOD = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": []}}


def line(**changes: Any) -> NumberedLine:
    return NumberedLine(3, json.dumps({k: v for k, v in {**GOOD, **changes}.items() if v is not ...}).encode())


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"method": "GET"}, "method", "line 3: method must be POST"),
        ({"url": "/v1/completions"}, "url", "line 3: url must be the batch's endpoint"),
        ({"body": [1]}, "body", "line 3: body must be an object"),
        ({"body": {"stream": True}}, "body.stream", "line 3: answers to a batch are not streamed"),
        ({"body": {"x": "y" * 9000}}, "body", "line 3: the body must be at most 4000 bytes"),
        ({"body": ...}, None, "line 3: .*body"),
        ({"url": 5}, None, "line 3: .*url"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(changes: dict[str, Any], field: str | None, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as raised:
        parse_line(line(**changes), CHAT, 4000)
    assert raised.value.field == field


@pytest.mark.parametrize(
    "data",
    [b"{", b"\xff\xfe", b'{"custom_id": "a"', b'{"body":' + b"[" * 9000, b"nul"],
    ids=["cut", "bytes", "half", "deep", "word"],
)
def test_bytes_that_are_no_json_have_an_error_and_no_name(data: bytes) -> None:
    broken = NumberedLine(1, data)
    assert custom_id_of(broken) is None
    with pytest.raises(InvalidRequestError, match="line 1 is not valid JSON"):
        parse_line(broken, CHAT, 10**6)
    result = unsent_line(broken, "invalid_request", "line 1 is no JSON")
    assert json.loads(result.data)["custom_id"] is None


@pytest.mark.parametrize("ident", [None, "", 5, "x" * 513])
def test_a_custom_id_is_a_short_string(ident: object) -> None:
    with pytest.raises(InvalidRequestError, match="line 3: custom_id") as raised:
        custom_id_of(line(custom_id=ident))
    assert raised.value.field == "custom_id"


def test_results_are_lines_of_json() -> None:
    result = answered_line(4, 'a"\n', 200, "req", b'{"id":1}')
    assert result[:2] == (4, False)
    assert result.data.count(b"\n") == 1
    value = json.loads(result.data)
    assert value.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "req", "body": {"id": 1}}
    assert value == {"custom_id": 'a"\n', "response": response, "error": None}
    assert answered_line(4, "a", 404, "req", b"{}").failed
    error = {"code": "c", "message": "m", "param": "p", "line": 3}
    value = json.loads(unsent_line(line(), "c", "m", "p").data)
    assert (value["custom_id"], value["response"], value["error"]) == ("a", None, error)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=30).map(lambda x: x.replace(b"\n", b"")), max_size=12), st.integers(1, 40))
def test_lines_are_found_however_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], size: int
) -> None:
    async def read(folder: Path) -> list[tuple[int, bytes | None]]:
        store = SqliteBatchStore(folder)
        data = b"\n".join(lines)
        for number, at in enumerate(range(0, len(data), size)):
            await store.write_part("file-x", number, data[at : at + size])
        read = [tuple(each) async for each in read_lines(store, "file-x", 20 - 4096)]
        await store.close()
        return read

    wanted = [(n, x if len(x) <= 20 else None) for n, x in enumerate(lines, 1) if x.strip() or len(x) > 20]
    assert asyncio.run(read(tmp_path_factory.mktemp("b"))) == wanted


# --- forms ---

FORM = (
    b'preamble\r\n--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--B\r\ncontent-disposition: form-data; name="file"; filename="a\\"b.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n{}\r\n--A\r\n--\r\n\r\n--B--\r\nepilogue"
)


@given(st.integers(1, len(FORM)))
def test_a_form_is_split_however_it_arrives(size: int) -> None:
    parser = MultipartParser(b"B")
    parts: list[tuple[FormPart, bytes]] = []
    for at in range(0, len(FORM), size):
        for event in parser.feed(FORM[at : at + size]):
            if isinstance(event, FormPart):
                parts.append((event, b""))
            else:
                parts[-1] = (parts[-1][0], parts[-1][1] + event)
    assert parser.done
    assert parts[0] == (("purpose", None), b"batch")
    assert parts[1] == (("file", 'a"b.jsonl'), b"{}\r\n--A\r\n--\r\n")


def test_a_boundary_inside_a_line_is_content() -> None:
    parser = MultipartParser(b"B")
    body = b'--B\r\nContent-Disposition: form-data; name="f"; filename=""\r\n\r\na--B\r\nb\r\n--B--'
    events = list(parser.feed(body))
    assert events[0] == FormPart("f", "")
    assert b"".join(x for x in events if isinstance(x, bytes)) == b"a--B\r\nb"


@pytest.mark.parametrize(
    "body",
    [
        b"--B\r\nX: y\r\n\r\n",
        b"--B\r\nContent-Disposition: form-data; name=x\r\n\r\n\r\n".replace(b"x", b'"x"') * 33,
        b"--B\r\n" + b"x" * 9000,
        b"--B??",
    ],
)
def test_malformed_forms_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        list(MultipartParser(b"B").feed(body))


@pytest.mark.parametrize(
    ("kind", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('Multipart/Form-Data; charset=utf-8; boundary="a b"', b"a b"),
        ("multipart/form-data", None),
        ("application/json", None),
        ("", None),
    ],
)
def test_boundaries(kind: str, boundary: bytes | None) -> None:
    if boundary is None:
        with pytest.raises(InvalidRequestError, match="multipart/form-data"):
            boundary_of(kind)
    else:
        assert boundary_of(kind) == boundary
