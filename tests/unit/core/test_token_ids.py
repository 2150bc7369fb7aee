"""Ids as arrays, and as the bytes that messages carry."""

from __future__ import annotations

import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequestError
from baton.token_ids import max_id, pack_ids, token_ids, unpack_ids

IDS = st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0, 255, 256, 2**31, 2**32 - 1]), max_size=50)


@given(IDS)
def test_ids_come_back_as_they_were(ids: list[int]) -> None:
    packed = pack_ids(ids)
    assert packed == b"".join(x.to_bytes(4, "little") for x in ids)
    assert unpack_ids(packed).tolist() == ids
    assert max_id(token_ids(ids)) == max(ids, default=0)


@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_the_wire_is_little_endian_everywhere(byteorder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = array("I", [1, 2**24])
    if byteorder != sys.byteorder:  # as such a machine would hold them
        ids.byteswap()
    expected = b"\x01\0\0\0\0\0\0\x01"
    monkeypatch.setattr(sys, "byteorder", byteorder)
    assert pack_ids(ids) == expected
    assert unpack_ids(expected) == ids


@pytest.mark.parametrize("ids", [[-1], [2**32]])
def test_what_is_no_id_is_refused(ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        token_ids(ids)


def test_an_array_is_not_copied() -> None:
    ids = array("I", [1, 2])
    assert token_ids(ids) is ids


@pytest.mark.parametrize("size", [1, 5, 7])
def test_bytes_that_end_within_an_id_are_refused(size: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        unpack_ids(bytes(size))
    assert caught.value.field == "prompt_token_ids"
