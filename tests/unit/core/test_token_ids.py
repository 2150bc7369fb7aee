"""Ids as arrays: the helpers in C do what the general way does, whatever stands around the ids."""

from __future__ import annotations

import itertools
import json
from array import array
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.v1 import worker_pb2
from baton.token_ids import find_ids, max_id, pack_ids, token_ids, varint

SIZES = (10, 2**7, 2**14, 10**5, 2**21, 10**7, 10**8, 2**28, 2**32)
"""Where ids get longer, as text or packed."""
ID = st.sampled_from(SIZES).flatmap(lambda size: st.integers(0, size - 1) | st.just(size - 1) | st.just(size % 2**32))
IDS = st.lists(ID, min_size=1, max_size=50)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3))
BODIES = st.dictionaries(st.text(max_size=8) | st.sampled_from(["prompt", "model"]), VALUES, max_size=5)


@given(IDS)
@settings(deadline=None)
def test_packing_is_what_protobuf_does(ids: list[int]) -> None:
    message = worker_pb2.GenerateRequest(prompt_token_ids=ids).SerializeToString()
    packed = pack_ids(token_ids(ids))
    assert message == b"\x12" + varint(len(packed)) + packed
    assert max_id(token_ids(ids)) == max(ids)


@given(st.integers(1, 2**64 - 1) | st.sampled_from([1, 127, 128, 2**14 - 1, 2**14, 2**64 - 1]))
def test_a_number_is_a_varint(number: int) -> None:
    assert b"\x08" + varint(number) == worker_pb2.CallEnd(call=number).SerializeToString()


def test_nothing_is_packed_as_nothing() -> None:
    assert pack_ids(token_ids([])) == b""
    assert max_id(token_ids([])) == 0


@pytest.mark.parametrize("ids", [[-1], [2**32]])
def test_what_is_no_id_is_refused(ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        token_ids(ids)


def test_an_array_is_not_copied() -> None:
    ids = array("I", [1, 2])
    assert token_ids(ids) is ids


@given(BODIES, IDS, st.sampled_from([None, 1]), st.integers(0, 5))
@settings(deadline=None)
def test_ids_are_found_among_other_fields(body: dict[str, Any], ids: list[int], indent: int | None, at: int) -> None:
    fields = [(key, value) for key, value in body.items() if key != "prompt"]
    fields.insert(min(at, len(fields)), ("prompt", ids))
    text = json.dumps(dict(fields), indent=indent, ensure_ascii=False).encode("utf-8", "surrogatepass")
    found = find_ids(text, b"prompt")
    if any("\\" in json.dumps(key, ensure_ascii=False) for key, _ in fields):  # cannot be said for sure
        assert found is None
        return
    assert found is not None
    assert list(found[0]) == ids
    assert (max_id(found[0]), pack_ids(found[0])) == (max(ids), b"".join(map(varint, ids)))
    assert json.loads(found[1]) == {**dict(fields), "prompt": []}


@given(BODIES)
@settings(deadline=None)
def test_what_is_found_is_what_a_parser_finds(body: dict[str, Any]) -> None:
    text = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    found = find_ids(text, b"prompt")
    if found is not None:
        assert {**json.loads(found[1]), "prompt": list(found[0])} == body


@pytest.mark.parametrize(
    "text",
    [
        b'{"prompt":[]}',
        b'{"prompt":[1.5]}',
        b'{"prompt":[1e3]}',
        b'{"prompt":[-1]}',
        b'{"prompt":[01]}',
        b'{"prompt":[4294967296]}',
        b'{"prompt":[99999999999999999999999]}',
        b'{"prompt":[true]}',
        b'{"prompt":["1"]}',
        b'{"prompt":[[1]]}',
        b'{"prompt":[1,]}',
        b'{"prompt":[1',
        b'{"prompt":[1]',
        b'{"prompt":"[1]"}',
        b'{"prompt":[1],"prompt":[2]}',
        b'{"prompt":[1],"prompt":"x"}',
        b'{"prompt":[1],"\\u0070rompt":"x"}',
        b'{"a":{"prompt":[1]}}',
        b'[{"prompt":[1]}]',
        b'"prompt"',
        b"",
    ],
)
def test_what_is_no_list_of_ids_is_left_to_the_parser(text: bytes) -> None:
    assert find_ids(text, b"prompt") is None


@given(
    st.lists(ID.map(str) | st.text("0123456789", max_size=12) | st.sampled_from(["-1", "1e3", "1.5", "+1", "x"])),
    st.lists(st.text(", \n\t", max_size=3) | st.sampled_from([",", ", "]), min_size=1),
    st.sampled_from(["}", ',"a":1}', " }\n"]),
)
@settings(deadline=None)
def test_a_list_is_read_as_a_parser_reads_it(items: list[str], between: list[str], rest: str) -> None:
    text = '{"prompt":[' + "".join(map("".join, zip(items, itertools.cycle(between), strict=False))) + "]" + rest
    _agree(text)
    _agree('{"prompt":[' + between[0].join(items) + "]" + rest)


def _agree(text: str) -> None:
    found = find_ids(text.encode(), b"prompt")
    try:
        ids = json.loads(text)["prompt"]
    except json.JSONDecodeError:
        assert found is None
        return
    if ids and all(type(item) is int and 0 <= item < 2**32 for item in ids):
        assert found is not None
        assert list(found[0]) == ids
    else:
        assert found is None


@given(st.binary(max_size=60) | st.text('{}[]":,\\ 0123456789promt', max_size=60).map(str.encode))
@settings(deadline=None)
def test_no_bytes_do_harm(text: bytes) -> None:
    found = find_ids(text, b"prompt")
    if found is not None:
        try:
            value = orjson.loads(found[1])
        except orjson.JSONDecodeError:
            return
        assert value["prompt"] == []
