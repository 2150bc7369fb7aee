from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.hashing import HASH_SCHEME, block_hashes, root_hash

ROOT = root_hash(b"k" * 32)


def test_the_scheme_is_what_the_docs_say():
    first = hashlib.sha256(ROOT + np.arange(4, dtype="<u4").tobytes()).digest()
    second = hashlib.sha256(first + np.arange(4, 8, dtype="<u4").tobytes()).digest()
    assert block_hashes(range(9), 4, ROOT) == [first, second]
    assert HASH_SCHEME == "sha256-chain-u32le-v1"


def test_salt_and_content_key_cannot_be_shifted_into_each_other():
    assert root_hash(b"ab", "c") != root_hash(b"a", "bc")
    assert root_hash(b"ab", "") != root_hash(b"ab", "x")


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=70), block_size=st.integers(1, 17), data=st.data())
def test_hashing_can_go_on_where_it_stopped(tokens, block_size, data):
    whole = block_hashes(tokens, block_size, ROOT)
    assert len(whole) == len(tokens) // block_size
    done = data.draw(st.integers(0, len(whole)))
    parent = whole[done - 1] if done else ROOT
    assert whole[:done] + block_hashes(tokens, block_size, parent, start=done * block_size) == whole
    assert block_hashes(np.array(tokens, dtype=np.uint32), block_size, ROOT) == whole


@given(tokens=st.lists(st.integers(0, 9), min_size=8, max_size=40), data=st.data())
def test_one_other_token_changes_its_block_and_all_behind_it(tokens, data):
    at = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    other = list(tokens)
    other[at] += 1
    same = [a == b for a, b in zip(block_hashes(tokens, 4, ROOT), block_hashes(other, 4, ROOT), strict=True)]
    assert same == [i < at // 4 for i in range(len(same))]
