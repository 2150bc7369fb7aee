"""Blocks as remote tiers write them, and what a node remembers of them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tests.support.transport.named_blocks import content, name_of, names
from tests.support.transport.remote_tiers import BLOCK, KIND, OTHER, value_of

from baton.types import BlockHash
from baton_kvstore.tiers.remote import HEADER_BYTES, RemoteIndex, decode_block, decode_kind
from baton_kvstore.types import KvFormat


def test_what_was_encoded_is_decoded() -> None:
    name = name_of(1)
    value = value_of(name)
    assert decode_kind(value[:HEADER_BYTES]) == KIND
    payload = decode_block(value, KIND, name)
    assert payload is not None
    assert bytes(payload) == content(name, KIND)
    assert decode_block(value, KIND, name_of(2)) is None
    assert decode_block(value, KvFormat(b"z" * 32, b"c" * 32, BLOCK), name) is None
    assert decode_block(value, KvFormat(KIND.key, KIND.content_key, BLOCK + 1), name) is None


@given(data=st.binary(max_size=2 * HEADER_BYTES))
def test_random_bytes_are_no_block(data: bytes) -> None:
    assert decode_kind(data) is None
    assert decode_block(data, KvFormat(b"k" * 32, b"c" * 32, max(1, len(data) - HEADER_BYTES)), name_of(1)) is None


@given(data=st.data())
def test_a_flipped_or_cut_value_is_no_block(data: st.DataObject) -> None:
    value = value_of(name_of(1), OTHER)
    at = data.draw(st.integers(0, len(value) - 1))
    flipped = bytearray(value)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    assert decode_block(bytes(flipped), OTHER, name_of(1)) is None
    assert decode_block(value[:at], OTHER, name_of(1)) is None
    assert decode_block(value + value[:at] + b"x", OTHER, name_of(1)) is None


# Index


@given(steps=st.lists(st.tuples(st.sampled_from("auds"), st.integers(0, 5), st.booleans()), max_size=40))
def test_the_index_is_bounded_and_its_listener_knows_what_it_holds(steps: list[tuple[str, int, bool]]) -> None:
    now = [0.0]
    index = RemoteIndex("redis", 3, absent_s=2.0, clock=lambda: now[0])
    heard: set[tuple[KvFormat, BlockHash]] = set()
    order: list[tuple[KvFormat, BlockHash]] = []

    def listen(kind: KvFormat, hashes: Sequence[BlockHash], tier: str, present: bool) -> None:
        for name in hashes:
            assert ((kind, name) in heard) != present
            (heard.add if present else heard.remove)((kind, name))

    index.listen(listen)
    for step, label, first in steps:
        kind, name = KIND if first else OTHER, name_of(label)
        if step in "au":
            known = (kind, name) in order
            if step == "a" or known:
                order = [entry for entry in order if entry != (kind, name)] + [(kind, name)]
            (index.add if step == "a" else index.use)(kind, [name])
            order = order[-3:]
        elif step == "d":
            assert index.drop(kind, [name]) == ([name] if (kind, name) in order else [])
            order = [entry for entry in order if entry != (kind, name)]
        else:
            assert set(index.drop(kind, None)) == {name for other, name in order if other == kind}
            order = [entry for entry in order if entry[0] != kind]
        assert heard == set(order)
        assert all(index.holds(*entry) for entry in order)
        assert (len(index), index.num_bytes) == (len(order), sum(kind.block_bytes for kind, _ in order))
        coldest = index.coldest(1)
        assert coldest == ((order[0][0], [order[0][1]]) if order else None)


def test_a_block_looked_for_in_vain_is_not_looked_for_again_at_once() -> None:
    now = [0.0]
    index = RemoteIndex("redis", 100, absent_s=2.0, clock=lambda: now[0])
    index.add(KIND, names(1))
    index.missed(KIND, names(2))
    assert index.unknown(KIND, names(1, 2, 3)) == names(3)
    assert index.unknown(OTHER, names(1, 2)) == names(1, 2)
    now[0] = 2.0
    assert index.unknown(KIND, names(1, 2, 3)) == names(2, 3)
    index.missed(KIND, names(2))
    index.add(KIND, names(2))
    index.drop(KIND, names(2))
    assert index.unknown(KIND, names(2)) == names(2)
