"""Blocks between instances of different parallel shape and block size, over every kind of pipe."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.transport.kv_shapes import pool_of, whole_kv
from tests.support.transport.transport_rig import HOST_KINDS, in_thread, soon, tls_of

from baton.errors import CancelledError, DeadlineError, PipeClosedError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_cache.shards import KVGeometry, KVShards, shard_layout, shard_specs
from baton.kv_transfer.blocks import (
    BlockFetcher,
    BlockServer,
    FetchResult,
    LinkOptions,
    MemoryNetwork,
    SequenceBlocks,
    ServerOptions,
    TcpOptions,
)
from baton.types import InstanceId

GEOMETRY = KVGeometry((LayerShape(4, 6, 4), LayerShape(2, 8, 8), LayerShape(4, 6, 4)), "float32")
TOKENS = 192
Shape = tuple[int, int, int]
"""TP, PP, block size."""


class Side:
    """An instance's arenas."""

    def __init__(self, shape: Shape) -> None:
        tp, pp, self.size = shape
        whole = KVLayout(GEOMETRY.layers, self.size, GEOMETRY.dtype)
        base = Fingerprint.of(model="m", model_digest="d", rope="r", layout=whole)
        self.print = Fingerprint(
            **{name: getattr(base, name) for name in base.__slots__} | {"tp_size": tp, "pp_size": pp}
        )
        self.specs = shard_specs(tp, pp)
        layouts = [shard_layout(GEOMETRY, spec, self.size) for spec in self.specs]
        self.blocks = TOKENS // self.size
        self.shards = KVShards([HostArena(self.blocks, layout.block_bytes) for layout in layouts])
        self.pools = [pool_of(GEOMETRY, spec, self.size, whole_kv(GEOMETRY, TOKENS)) for spec in self.specs]

    def fill(self) -> None:
        for arena, pool in zip(self.shards.arenas, self.pools, strict=True):
            arena.blocks[:] = pool
        self.shards.primary.generations[:] = np.arange(self.blocks) + 5


class Pair:
    """A source with its blocks in another order than the sequence's, and a target."""

    def __init__(self, kind: str, streams: int, source: Shape, target: Shape) -> None:
        self.source, self.target = Side(source), Side(target)
        self.source.fill()
        network = MemoryNetwork()
        self.server = BlockServer(
            self.source.shards,
            self.source.print,
            InstanceId("p"),
            kinds=(kind,),
            options=ServerOptions(memory=network, tls=tls_of(kind)),
        )
        links = LinkOptions(
            tcp=TcpOptions(streams, share_bytes=1, streams_on_host=streams), memory=network, tls=tls_of(kind)
        )
        self.fetcher = BlockFetcher(self.target.shards, self.target.print, kinds=(kind,), links=links)

    def blocks(self, *, held: int = 0, ready: int | None = None) -> SequenceBlocks:
        ids = np.arange(self.source.blocks)
        writable = np.arange(self.target.blocks) >= held
        offered = (ids, self.source.shards.primary.generations[ids], ids)
        return SequenceBlocks.of(offered, np.arange(self.target.blocks), writable, ready)

    def fetch(self, **options: int | None) -> FetchResult:
        return self.fetcher.fetch_sequence(self.server.source, self.blocks(**options), deadline=soon())  # type: ignore[arg-type]

    def right(self, first: int = 0) -> bool:
        return all(
            np.array_equal(arena.blocks[first:, : _used(arena, pool)], pool[first:, : _used(arena, pool)])
            for arena, pool in zip(self.target.shards.arenas, self.target.pools, strict=True)
        )

    def close(self) -> None:
        self.fetcher.close()
        self.server.close()
        self.source.shards.close()
        self.target.shards.close()


def _used(arena: HostArena, pool: np.ndarray) -> int:
    return min(arena.block_bytes, int(pool.shape[1]))


SHAPES: list[tuple[Shape, Shape]] = [
    ((2, 1, 16), (1, 1, 16)),
    ((1, 1, 16), (2, 1, 16)),
    ((2, 1, 16), (2, 1, 16)),
    ((1, 2, 16), (1, 1, 16)),
    ((2, 1, 16), (1, 3, 16)),
    ((4, 1, 16), (2, 2, 32)),
    ((1, 1, 16), (1, 1, 32)),
    ((1, 1, 32), (1, 1, 16)),
    ((2, 2, 24), (1, 1, 16)),
]


@pytest.fixture(params=HOST_KINDS, ids=lambda p: f"{p[0]}-{p[1]}")
def kind(request: pytest.FixtureRequest) -> tuple[str, int]:
    found: tuple[str, int] = request.param
    return found


@pytest.fixture
def pair(kind: tuple[str, int]) -> Iterator[Pair]:
    pair = Pair(*kind, (2, 1, 16), (1, 2, 32))
    yield pair
    pair.close()


@pytest.mark.parametrize(("source", "target"), SHAPES)
def test_bytes_equal_a_plain_reshape(kind: tuple[str, int], source: Shape, target: Shape) -> None:
    pair = Pair(*kind, source, target)
    result = pair.fetch()
    assert result.valid.all()
    assert len(result.valid) == pair.source.blocks
    assert pair.right()
    pair.close()


def test_blocks_that_are_there_already_are_not_written(pair: Pair) -> None:
    for arena in pair.target.shards.arenas:
        arena.blocks[:] = 0xEE
    assert pair.fetch(held=2).valid.all()
    for arena in pair.target.shards.arenas:
        assert (arena.blocks[:2] == 0xEE).all()
    assert pair.right(2)


def test_only_blocks_that_changed_are_not_valid(pair: Pair) -> None:
    blocks = pair.blocks()
    pair.source.shards.primary.generations[3] += np.uint64(1)
    result = pair.fetcher.fetch_sequence(pair.server.source, blocks, deadline=soon())
    assert np.flatnonzero(~result.valid).tolist() == [3]


@pytest.mark.parametrize("source", [(1, 1, 16), (2, 1, 16), (1, 3, 16)])
def test_layers_arrive_as_they_are_computed(kind: tuple[str, int], source: Shape) -> None:
    pair = Pair(*kind, source, (1, 1, 16))
    progress = pair.source.shards.primary.progress
    progress.advance(100)
    job = in_thread(lambda: pair.fetch(ready=100))
    arena = pair.target.shards.arenas[0]
    for layer in range(len(GEOMETRY.layers)):
        before = arena.blocks.copy()
        assert not job.done()
        progress.advance(100 + layer + 1)
        if layer == 0:
            deadline = time.monotonic() + 240
            while np.array_equal(before, arena.blocks):  # the first layer comes without waiting for the others
                assert time.monotonic() < deadline
    assert job.result(240).valid.all()
    assert pair.right()
    pair.close()


@pytest.mark.parametrize("source", [(1, 1, 16), (2, 1, 16)])
def test_layers_of_more_spans_than_a_request_takes_arrive_as_they_are_computed(
    source: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kv_transfer.types.MAX_SPANS_PER_READ", 4)
    test_layers_arrive_as_they_are_computed(("tcp", 1), source)


@pytest.mark.parametrize("source", [(1, 1, 16), (2, 1, 16)])
def test_blocks_recycled_between_two_layers_are_not_valid(kind: tuple[str, int], source: Shape) -> None:
    pair = Pair(*kind, source, (1, 1, 16))
    arena = pair.target.shards.arenas[0]
    job = in_thread(lambda: pair.fetch(ready=0))
    before = arena.blocks.copy()
    pair.source.shards.primary.progress.advance(1)
    deadline = time.monotonic() + 240
    while np.array_equal(before, arena.blocks):
        assert time.monotonic() < deadline
    pair.source.shards.primary.generations[[2, 5]] += np.uint64(1)
    pair.source.shards.primary.progress.advance(len(GEOMETRY.layers))
    assert np.flatnonzero(~job.result(240).valid).tolist() == [2, 5]
    assert pair.fetch().valid.all()  # the connection is in step
    pair.close()


def test_waiting_for_layers_ends_with_the_deadline_or_the_flag(pair: Pair) -> None:
    with pytest.raises(DeadlineError):
        pair.fetcher.fetch_sequence(pair.server.source, pair.blocks(ready=7), deadline=soon(0.1))
    flag = threading.Event()
    job = in_thread(
        lambda: pair.fetcher.fetch_sequence(pair.server.source, pair.blocks(ready=7), deadline=soon(), cancelled=flag)
    )
    flag.set()
    with pytest.raises(CancelledError):
        job.result(240)
    assert pair.fetch().valid.all()


def test_waiting_for_layers_ends_with_the_source(pair: Pair) -> None:
    pair.fetch()
    job = in_thread(lambda: pair.fetch(ready=7))
    pair.server.close()
    with pytest.raises(PipeClosedError):
        job.result(240)
