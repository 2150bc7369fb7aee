"""Block copies against plain indexing, and how runs are found."""

from __future__ import annotations

import itertools
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.transport.transport_rig import open_fds

from baton.errors import CancelledError, DeadlineError, PipeClosedError
from baton.kv_cache.reshard import Segments
from baton.kv_transfer.native_copy import COPY_BATCH_BYTES, BlockReader, Line, fence, merge_runs
from baton.kv_transfer.streams import Stream, Wait
from baton.kv_transfer.types import BlockReads, Bytes, Ids


def copy(local: Bytes, remote: Bytes, ids: tuple[Ids, Ids], wait: Wait, segments: Segments | None = None) -> None:
    """Copy remote blocks ``ids[0]`` to local ``ids[1]``; all have the generation that is asked for."""
    generations = np.arange(len(remote), dtype=np.uint64) * 7
    reads = BlockReads(ids[0], generations[ids[0]], ids[1], segments)
    assert BlockReader(remote, generations).read(local, reads, wait).all()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_copy_is_indexing(data: st.DataObject) -> None:
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
    copy(local, remote, (remote_ids, local_ids), Wait(time.monotonic() + 240))
    assert np.array_equal(local, expected)


def test_many_small_blocks() -> None:
    rng = np.random.default_rng(1)
    remote = rng.integers(0, 256, (5000, 96), dtype=np.uint8)
    local = np.zeros_like(remote)
    there, here = rng.permutation(5000), rng.permutation(5000)
    copy(local, remote, (there, here), Wait(time.monotonic() + 240))
    assert np.array_equal(local[here], remote[there])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_segments_go_where_they_say(data: st.DataObject) -> None:
    """Between blocks of different sizes; what no segment names is left alone."""
    from_size, to_size = data.draw(st.tuples(st.integers(1, 300), st.integers(1, 300)))
    cuts = sorted(data.draw(st.sets(st.integers(0, min(from_size, to_size)), min_size=2, max_size=8)))
    shift, back = data.draw(st.integers(0, from_size - cuts[-1])), data.draw(st.integers(0, to_size - cuts[-1]))
    rows = [(a + shift, a + back, b - a) for a, b in itertools.pairwise(cuts)]
    kept = data.draw(st.permutations(rows))[: data.draw(st.integers(1, len(rows)))]
    remote = np.random.default_rng(0).integers(0, 256, (9, from_size), dtype=np.uint8)
    local = np.full((11, to_size), 0xEE, dtype=np.uint8)
    there, here = np.random.default_rng(1).permutation(9), np.random.default_rng(2).permutation(11)[:9]
    expected = local.copy()
    for begin, to, size in kept:
        expected[here, to : to + size] = remote[there, begin : begin + size]
    copy(local, remote, (there, here), Wait(time.monotonic() + 240), np.array(kept, dtype=np.int64))
    assert np.array_equal(local, expected)


def test_blocks_of_another_generation_are_not_copied() -> None:
    remote, local = np.ones((6, 64), dtype=np.uint8), np.zeros((6, 64), dtype=np.uint8)
    generations, ids = np.full(6, 3, dtype=np.uint64), np.arange(6)
    wanted = np.array([3, 2, 3, 3, 4, 3], dtype=np.uint64)
    valid = BlockReader(remote, generations).read(local, BlockReads(ids, wanted, ids), Wait(time.monotonic() + 240))
    assert valid.tolist() == [True, False, True, True, False, True]
    assert local[:, 0].tolist() == [1, 0, 1, 1, 0, 1]


def test_a_block_that_changes_during_the_copy_is_not_valid() -> None:
    size, blocks = 1 << 20, 3 * COPY_BATCH_BYTES // (1 << 20)
    remote, local = np.ones((blocks, size), dtype=np.uint8), np.zeros((blocks, size), dtype=np.uint8)
    generations, ids = np.zeros(blocks, dtype=np.uint64), np.arange(blocks)

    class Writer:
        """Changes a block's generation once the first batch is copied: it is looked at between batches."""

        looks = 0

        def is_set(self) -> bool:
            self.looks += 1
            if self.looks == 2:
                generations[[0, blocks - 1]] += np.uint64(1)
            return False

    reads = BlockReads(ids, generations.copy(), ids)
    valid = BlockReader(remote, generations).read(local, reads, Wait(time.monotonic() + 240, Writer()))
    assert valid[0]  # checked after its own batch, before the change
    assert np.flatnonzero(~valid).tolist() == [blocks - 1]


@pytest.mark.parametrize("last_words", [b"", b"x"])
def test_nothing_is_valid_once_the_owner_has_hung_up(last_words: bytes) -> None:
    mine, theirs = socket.socketpair()
    remote, local, ids = np.ones((2, 64), dtype=np.uint8), np.zeros((2, 64), dtype=np.uint8), np.arange(2)
    stream = Stream(mine, peer="owner")
    reader = BlockReader(remote, np.zeros(2, dtype=np.uint64), Line(stream))
    reads, wait = BlockReads(ids, np.zeros(2, dtype=np.uint64), ids), Wait(time.monotonic() + 240)
    assert reader.read(local, reads, wait).all()
    assert reader.holds()
    theirs.send(last_words)
    theirs.close()
    with pytest.raises(PipeClosedError, match="owner"):
        reader.read(local, reads, wait)
    assert not reader.holds()
    stream.close()


def test_a_stream_closed_on_this_side_ends_reads_and_leaves_no_descriptor() -> None:
    fds = open_fds()
    mine, theirs = socket.socketpair()
    stream = Stream(mine, peer="owner")
    remote, local, ids = np.ones((1, 64), dtype=np.uint8), np.zeros((1, 64), dtype=np.uint8), np.zeros(1, np.int64)
    reader = BlockReader(remote, np.zeros(1, dtype=np.uint64), Line(stream))
    stream.close()
    with pytest.raises(PipeClosedError):
        reader.read(local, BlockReads(ids, np.zeros(1, dtype=np.uint64), ids), Wait(time.monotonic() + 240))
    assert theirs.recv(1) == b""  # it is told at once
    theirs.close()
    del reader
    assert open_fds() == fds


class Countdown:
    """A cancel flag that is set from the n-th look on."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_long_copies_look_at_the_flag_and_the_clock() -> None:
    size = 1 << 20
    blocks = 3 * COPY_BATCH_BYTES // size
    remote, local = np.ones((blocks, size), dtype=np.uint8), np.zeros((blocks, size), dtype=np.uint8)
    ids = np.arange(blocks)
    with pytest.raises(CancelledError):
        copy(local, remote, (ids, ids), Wait(time.monotonic() + 240, Countdown(2)))
    copied = int(local[:, 0].sum())
    assert 0 < copied < blocks
    with pytest.raises(DeadlineError):
        copy(local, remote, (ids, ids), Wait(time.monotonic() - 1))
    flag = threading.Event()
    copy(local, remote, (ids, ids), Wait(time.monotonic() + 240, flag))
    assert local.all()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40))
def test_runs_cover_the_pairs_in_order_and_are_as_long_as_can_be(pairs: list[tuple[int, int]]) -> None:
    remote = np.array([a for a, _ in pairs], dtype=np.int64)
    local = np.array([b for _, b in pairs], dtype=np.int64)
    runs = merge_runs(remote, local).tolist()
    assert [(r + i, b + i) for b, r, n in runs for i in range(n)] == pairs
    for (b, r, n), (next_b, next_r, _) in itertools.pairwise(runs):
        assert (next_b, next_r) != (b + n, r + n)


def test_fence_returns() -> None:
    fence()
