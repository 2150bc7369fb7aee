"""A reader remembers where arrays lie: arrays that come and go, often at the same place, are still told apart."""

from __future__ import annotations

import time

import numpy as np

from baton.kv_transfer.native_copy import BlockReader
from baton.kv_transfer.streams import Wait
from baton.kv_transfer.types import BlockReads


def test_targets_and_sources_that_come_and_go() -> None:
    rng = np.random.default_rng(0)
    for turn in range(100):
        size = int(rng.integers(1, 200))
        remote, generations = rng.integers(0, 256, (5, size), dtype=np.uint8), np.full(5, turn, np.uint64)
        reader = BlockReader(remote, generations)
        for name in ("remote_ids", "generations", "local_ids"):
            local = np.zeros((4, size), np.uint8)
            reads = BlockReads.of([4, 1, 2], [turn, turn, turn + 1], [0, 3, 1])
            getattr(reads, name).flags.writeable = False
            valid = reader.read(local, reads, Wait(time.monotonic() + 240))
            assert valid.tolist() == [True, True, False]
            assert (local[[0, 3]] == remote[[4, 1]]).all()
            assert not local[1:3].any()
            del local  # the next one often takes its place


def test_no_blocks() -> None:
    local = np.zeros((1, 8), np.uint8)
    reads, reader = BlockReads.of([], [], []), BlockReader(local.copy(), np.zeros(1, np.uint64))
    assert len(reader.read(local, reads, Wait(time.monotonic() + 240))) == 0
