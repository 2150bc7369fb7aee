"""Block copies: both ways of copying against plain indexing, and how runs are found."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import CancelledError, DeadlineError
from baton.transport.copying import BATCH_BYTES, BlockCopier, fence, id_runs, merge_runs
from baton.transport.waiting import Wait

COPIERS = {"native": BlockCopier(), "libc": BlockCopier(native=False)}


def test_without_a_compiler_libc_serves() -> None:
    assert BlockCopier(compilers=("no-such-compiler",)).method == "libc"
    assert COPIERS["libc"].method == "libc"


def test_a_compiler_that_fails_is_no_error() -> None:
    assert BlockCopier(compilers=("false",)).method == "libc"


@pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_copy_is_indexing(copier: BlockCopier, data: st.DataObject) -> None:
    """Any block size, also ones that leave targets unaligned, and any choice of blocks; around it nothing changes."""
    size = data.draw(st.sampled_from([1, 63, 64, 4096, 16384, 16448, 40_000, 300_000]))
    blocks = data.draw(st.integers(1, max(1, min(64, 6_000_000 // size))))
    remote = np.random.default_rng(0).integers(0, 256, (blocks, size), dtype=np.uint8)
    count = data.draw(st.integers(0, blocks))
    remote_ids = np.array(data.draw(st.permutations(range(blocks))), dtype=np.int64)[:count]
    local_ids = np.array(data.draw(st.permutations(range(blocks + 3))), dtype=np.int64)[:count]
    if data.draw(st.booleans()):
        remote_ids, local_ids = np.sort(remote_ids), np.sort(local_ids)
    local = np.full((blocks + 3, size), 0xEE, dtype=np.uint8)
    expected = local.copy()
    expected[local_ids] = remote[remote_ids]
    copier.copy(local, remote, remote_ids, local_ids, Wait(time.monotonic() + 60))
    assert np.array_equal(local, expected)


@pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)
def test_more_runs_than_one_system_call_takes(copier: BlockCopier) -> None:
    rng = np.random.default_rng(1)
    remote = rng.integers(0, 256, (5000, 96), dtype=np.uint8)
    local = np.zeros_like(remote)
    there, here = rng.permutation(5000), rng.permutation(5000)
    copier.copy(local, remote, there, here, Wait(time.monotonic() + 60))
    assert np.array_equal(local[here], remote[there])


class Countdown:
    """A cancel flag that is set from the n-th look on."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)
def test_long_copies_look_at_the_flag_and_the_clock(copier: BlockCopier) -> None:
    size = 1 << 20
    blocks = 3 * BATCH_BYTES // size
    remote, local = np.ones((blocks, size), dtype=np.uint8), np.zeros((blocks, size), dtype=np.uint8)
    ids = np.arange(blocks)
    with pytest.raises(CancelledError):
        copier.copy(local, remote, ids, ids, Wait(time.monotonic() + 60, Countdown(2)))
    copied = int(local[:, 0].sum())
    assert 0 < copied < blocks
    with pytest.raises(DeadlineError):
        copier.copy(local, remote, ids, ids, Wait(time.monotonic() - 1))
    flag = threading.Event()
    copier.copy(local, remote, ids, ids, Wait(time.monotonic() + 60, flag))
    assert local.all()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40))
def test_runs_cover_the_pairs_in_order_and_are_as_long_as_can_be(pairs: list[tuple[int, int]]) -> None:
    remote = np.array([a for a, _ in pairs], dtype=np.int64)
    local = np.array([b for _, b in pairs], dtype=np.int64)
    runs = merge_runs(remote, local).tolist()
    assert [(r + i, b + i) for b, r, n in runs for i in range(n)] == pairs
    for (b, r, n), (next_b, next_r, _) in itertools.pairwise(runs):
        assert (next_b, next_r) != (b + n, r + n)


@given(st.lists(st.integers(0, 30), max_size=40))
def test_runs_of_one_side(ids: list[int]) -> None:
    runs = id_runs(np.array(ids, dtype=np.int64))
    assert [i for first, end in runs for i in range(first, end)] == ids
    for (_, end), (first, _) in itertools.pairwise(runs):
        assert first != end


def test_fence_returns() -> None:
    fence()
