from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.hashing import (
    _HAS_SHA,
    HASH_SCHEME,
    HashChain,
    as_token_array,
    block_hashes,
    hash_chain,
    hash_memory,
    root_hash,
)
from baton.native import address_of
from baton.types import BlockHash

ROOT = root_hash(b"k" * 32)


def test_the_scheme_is_what_the_docs_say():
    first = hashlib.sha256(ROOT + np.arange(4, dtype="<u4").tobytes()).digest()
    second = hashlib.sha256(first + np.arange(4, 8, dtype="<u4").tobytes()).digest()
    assert block_hashes(range(9), 4, ROOT) == [first, second]
    assert HASH_SCHEME == "sha256-chain-u32le-v1"


def test_salt_and_content_key_cannot_be_shifted_into_each_other():
    assert root_hash(b"ab", "c") != root_hash(b"a", "bc")
    assert root_hash(b"ab", "") != root_hash(b"ab", "x")
    assert root_hash(b"ab", "x", "y") != root_hash(b"ab", "xy")
    assert len({root_hash(b"ab", "x", adapter) for adapter in ("", "y", "z")}) == 3
    assert root_hash(b"ab", "x", "") == root_hash(b"ab", "x")


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=70), block_size=st.integers(1, 17), data=st.data())
def test_hashing_can_go_on_where_it_stopped(tokens, block_size, data):
    whole = block_hashes(tokens, block_size, ROOT)
    assert len(whole) == len(tokens) // block_size
    done = data.draw(st.integers(0, len(whole)))
    parent = whole[done - 1] if done else ROOT
    assert whole[:done] + block_hashes(tokens, block_size, parent, start=done * block_size) == whole
    assert block_hashes(np.array(tokens, dtype=np.uint32), block_size, ROOT) == whole
    assert list(hash_chain(tokens, block_size, ROOT)) == whole


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 9), min_size=8, max_size=40), data=st.data())
def test_one_other_token_changes_its_block_and_all_behind_it(tokens, data):
    at = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    other = list(tokens)
    other[at] += 1
    same = [a == b for a, b in zip(block_hashes(tokens, 4, ROOT), block_hashes(other, 4, ROOT), strict=True)]
    assert same == [i < at // 4 for i in range(len(same))]


@pytest.mark.parametrize("instructions", [True, False])
@settings(deadline=None)
@given(
    block_size=st.integers(1, 100),
    count=st.integers(0, 9),
    parent=st.binary(min_size=32, max_size=32),
    seed=st.integers(0, 2**32 - 1),
)
@example(7, 3, bytes(32), 0)  # 60 bytes with the parent: the length needs a piece of its own
@example(8, 3, bytes(32), 0)  # exactly one piece of 64 bytes
@example(16, 2048, bytes(32), 0)
def test_c_hashes_as_hashlib_does(instructions, block_size, count, parent, seed):
    if instructions and not _HAS_SHA:
        pytest.skip("this processor has no instructions for SHA-256")
    data = np.random.default_rng(seed).integers(0, 2**32, block_size * count, dtype=np.uint32)
    expected, last = [], parent
    for piece in data.reshape(count, block_size):
        last = hashlib.sha256(last + piece.tobytes()).digest()
        expected.append(last)
    found = hash_memory(address_of(data), 4 * block_size, count, parent, instructions=instructions)
    assert found == b"".join(expected)


def test_part_of_an_array_is_hashed_where_it_lies():
    tokens = as_token_array(list(range(1000)))
    whole = hash_chain(tokens, 4, ROOT)
    assert hash_chain(tokens[:803], 4, ROOT) == whole[:200]
    assert hash_chain(tokens, 4, whole[99], start=400) == whole[100:]


@given(count=st.integers(0, 9), at=st.slices(9), index=st.integers(-12, 12))
def test_a_chain_behaves_as_a_list_of_hashes(count, at, index):
    plain = [BlockHash(bytes([i]) * 32) for i in range(count)]
    chain = HashChain.of(plain)
    assert list(chain) == plain
    assert list(reversed(chain)) == plain[::-1]
    assert len(chain) == count
    assert HashChain.of(chain) is chain
    assert list(chain[at]) == plain[at]
    if -count <= index < count:
        assert chain[index] == plain[index]
        assert plain[index] in chain
    else:
        with pytest.raises(IndexError):
            chain[index]
