"""Blocks between instances of different KV dtype, over every kind of pipe: what arrives is a plain ``Tensor.to``."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.transport.kv_pair import KV_TYPES, LAYERS, RESHARDED, TOKENS, Pair, Shape
from tests.support.transport.transport_faults import Proxy
from tests.support.transport.transport_rig import HOST_KINDS, in_thread, soon

from baton.errors import BatonError, CancelledError, DeadlineError, FingerprintMismatchError
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.blocks.staging import MAX_AREAS, Staging
from baton.kv_transfer.streams import Wait

MIXED = "int8;bfloat16@0,2"
PAIRS = [(a, b) for a in KV_TYPES for b in KV_TYPES if a != b]


@pytest.fixture(params=HOST_KINDS, ids=lambda p: f"{p[0]}-{p[1]}")
def kind(request: pytest.FixtureRequest) -> tuple[str, int]:
    found: tuple[str, int] = request.param
    return found


@pytest.fixture
def pair(kind: tuple[str, int]) -> Iterator[Pair]:
    pair = Pair(*kind)
    yield pair
    pair.close()


@pytest.mark.parametrize("dtypes", [*PAIRS, (MIXED, "bfloat16"), ("float32", MIXED), (MIXED, "int8")], ids=" to ".join)
def test_what_arrives_is_what_torch_makes_of_it(kind: tuple[str, int], dtypes: tuple[str, str]) -> None:
    for shapes in (RESHARDED, ((1, 1, 16), (1, 1, 16))):
        pair = Pair(*kind, shapes, dtypes)
        result = pair.fetch()
        assert result.valid.all()
        assert pair.right()
        assert result.num_bytes == TOKENS * KVLayout(LAYERS, 16, dtypes[0]).bytes_per_token  # the source's bytes
        pair.close()


@pytest.mark.parametrize("dtype", ["int8", MIXED])
def test_int8_goes_as_it_is_with_its_scales(kind: tuple[str, int], dtype: str) -> None:
    same: tuple[Shape, Shape] = ((1, 1, 16), (1, 1, 16))
    for shapes in (same, RESHARDED, ((1, 1, 32), (2, 1, 16))):
        pair = Pair(*kind, shapes, (dtype, dtype))
        assert pair.fetch().valid.all()
        assert pair.right()
        progress = pair.source.shards.primary.progress
        progress.advance(len(LAYERS))
        assert pair.fetch(ready=0).valid.all()
        pair.close()


@settings(max_examples=40, deadline=None)
@given(
    tps=st.tuples(st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4))),
    pps=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    sizes=st.tuples(st.sampled_from((4, 8, 12, 16, 48)), st.sampled_from((4, 8, 12, 16, 48))),
    layers=st.lists(
        st.tuples(st.sampled_from((1, 2, 4)), st.integers(1, 5), st.integers(1, 5)), min_size=2, max_size=4
    ),
    dtypes=st.sampled_from(PAIRS),
    area=st.sampled_from((64, 1 << 10, 1 << 20)),
    medium=st.sampled_from(("memory", "tcp")),
    ready=st.sampled_from((None, 0)),
)
def test_any_shapes_block_sizes_and_dtypes(
    tps: tuple[int, int],
    pps: tuple[int, int],
    sizes: tuple[int, int],
    layers: list[tuple[int, int, int]],
    dtypes: tuple[str, str],
    area: int,
    medium: str,
    ready: int | None,
) -> None:
    shapes = [(tp, pp, size) for tp, pp, size in zip(tps, pps, sizes, strict=True)]
    pair = Pair(medium, 1, (shapes[0], shapes[1]), dtypes, tuple(LayerShape(*x) for x in layers))
    pair.fetcher._staging = Staging(area_bytes=area)
    pair.source.shards.primary.progress.advance(len(layers))
    assert pair.fetch(ready=ready).valid.all()
    assert pair.right()
    pair.close()


def test_without_leave_to_convert_both_sides_refuse_and_say_what_would_help(kind: tuple[str, int]) -> None:
    pair = Pair(*kind)
    fetcher = pair.open_fetcher(kind[0], kv_cast=False)
    with pytest.raises(
        FingerprintMismatchError, match=r"kv_dtype: 'bfloat16' here, 'float32' there; .*--kv-cast"
    ) as no:
        fetcher.fetch_sequence(pair.server.source, pair.blocks(), deadline=soon())
    assert no.value.field == "kv_dtype"
    fetcher.close()
    pair.close()


def test_blocks_that_are_there_already_are_not_written(pair: Pair) -> None:
    for arena in pair.target.shards.arenas:
        arena.blocks[:] = 0xEE
        arena.blocks[2:] = 0
    assert pair.fetch(held=2).valid.all()
    for arena in pair.target.shards.arenas:
        assert (arena.blocks[:2] == 0xEE).all()
    assert pair.right(2)


def test_blocks_that_changed_are_not_valid_and_not_converted(pair: Pair) -> None:
    pair.fetcher._staging = Staging(area_bytes=1 << 12)  # two blocks at a time
    blocks = pair.blocks()
    pair.source.shards.primary.generations[6] += np.uint64(1)
    result = pair.fetcher.fetch_sequence(pair.server.source, blocks, deadline=soon())
    assert np.flatnonzero(~result.valid).tolist() == [6]
    assert result.failure == "1 blocks changed, or were damaged, on their way"
    for arena, pool in zip(pair.target.shards.arenas, pair.target.pools, strict=True):
        differ = np.flatnonzero((arena.blocks != pool).any(axis=1))
        assert differ.tolist() == [3]  # of 32 tokens: its first half


@pytest.mark.parametrize(("dtypes", "number"), [(("float32", "float16"), 65520.0), (("bfloat16", "float16"), -7e4)])
def test_a_number_out_of_range_costs_its_block(kind: tuple[str, int], dtypes: tuple[str, str], number: float) -> None:
    pair = Pair(*kind, RESHARDED, dtypes)
    pair.fetcher._staging = Staging(area_bytes=1 << 12)  # two blocks at a time
    view = torch.from_numpy(pair.source.shards.arenas[1].blocks).view(getattr(torch, dtypes[0]))
    view[[4, 8], 9] = number
    result = pair.fetch()
    assert np.flatnonzero(~result.valid).tolist() == [4, 8]
    assert result.num_out_of_range == 2
    assert result.failure == "2 blocks have numbers out of this instance's dtype's range"
    view[[4, 8], 9] = float("inf")  # is infinite there, too: nothing is lost
    assert pair.fetch().valid.all()
    pair.close()


@pytest.mark.parametrize("source", [(1, 1, 16), (2, 1, 16)])
def test_layers_arrive_as_they_are_computed(kind: tuple[str, int], source: Shape) -> None:
    pair = Pair(*kind, (source, (1, 1, 16)))
    progress = pair.source.shards.primary.progress
    progress.advance(100)
    job = in_thread(lambda: pair.fetch(ready=100))
    arena = pair.target.shards.arenas[0]
    for layer in range(len(LAYERS)):
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
    assert pair.fetcher._staging.num_free() == pair.fetcher._staging.num_areas


@pytest.mark.parametrize("seed", range(25))
def test_a_way_that_garbles_or_breaks_never_makes_a_wrong_block_valid(seed: int) -> None:
    """Checksums are of the source's bytes, before they are converted."""
    pair, rng = Pair("tcp"), random.Random(seed)
    at_byte = rng.randrange(40_000)

    def garble(at: int, data: bytes) -> bytes:
        if not at <= at_byte < at + len(data):
            return data
        changed = bytearray(data)
        changed[at_byte - at] ^= 1 << rng.randrange(8)
        return bytes(changed)

    address = pair.server.endpoints[0].address
    proxy = Proxy(address, garble) if seed % 2 else Proxy(address, cut_at=at_byte)
    try:
        blocks = pair.blocks(ready=0 if seed % 3 else None)
        pair.source.shards.primary.progress.advance(len(LAYERS))
        result = pair.fetcher.fetch_sequence(proxy.source(pair.server.source), blocks, deadline=soon(2))
    except BatonError:
        pass  # refused, or broken off: right
    else:
        for place in range(pair.target.blocks):
            if result.valid[2 * place : 2 * place + 2].all():  # blocks of 16 tokens make one of 32
                assert pair.right(place, place + 1)
    proxy.close()
    assert pair.fetcher._staging.num_free() == pair.fetcher._staging.num_areas
    pair.close()


def test_many_fetches_share_few_areas(kind: tuple[str, int]) -> None:
    pair = Pair(*kind)
    jobs = [in_thread(pair.fetch) for _ in range(MAX_AREAS + 4)]
    assert all(job.result(240).valid.all() for job in jobs)
    assert pair.right()
    staging = pair.fetcher._staging
    assert staging.num_free() == staging.num_areas <= MAX_AREAS
    pair.close()


def test_areas_are_bounded_lent_once_and_used_again() -> None:
    staging = Staging(area_bytes=1 << 10, max_areas=2)
    wait = Wait(soon())
    with staging.area(wait, 1) as first, staging.area(wait, 2) as second:
        assert first.ctypes.data != second.ctypes.data
        assert all(area.nbytes == 1 << 10 and area.ctypes.data % 64 == 0 for area in (first, second))
        with pytest.raises(DeadlineError), staging.area(Wait(soon(0.05)), 3):
            pass
        waiting = in_thread(lambda: _address(staging))
    assert waiting.result(240) in (first.ctypes.data, second.ctypes.data)
    assert staging.num_areas == 2


def test_a_source_that_hangs_leaves_areas_to_others() -> None:
    staging = Staging(area_bytes=1 << 10, max_areas=8)
    with contextlib.ExitStack() as held:
        for owner, most in (("hung", 4), ("hung too", 2), ("healthy", 2)):
            for _ in range(most):
                held.enter_context(staging.area(Wait(soon()), owner))
            with pytest.raises(DeadlineError), staging.area(Wait(soon(0.02)), owner):
                pass
    assert staging.num_free() == 8


def _address(staging: Staging) -> int:
    with staging.area(Wait(soon()), 3) as area:
        return int(area.ctypes.data)
