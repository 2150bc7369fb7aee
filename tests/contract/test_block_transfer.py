"""What block transfer promises over every kind of pipe. A new kind joins by an entry in ``KINDS``."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.support.transport.transport_rig import LAYOUT, PRINT, Rig, in_thread, silent_source, soon, tls_of

from baton.errors import (
    CancelledError,
    DeadlineError,
    FingerprintMismatchError,
    InvalidRequestError,
    PipeClosedError,
    QueueFullError,
    StaleBlockError,
)
from baton.kv_cache.layout import LayerShape
from baton.kv_cache.shards import ShardSpec, shard_layout
from baton.kv_transfer.blocks import BlockFetcher, BlockSource, LinkOptions, SequenceBlocks
from baton.types import Epoch


@pytest.mark.parametrize("pattern", ["one", "contiguous", "scattered", "backwards", "interleaved", "all"])
def test_blocks_arrive_where_they_should_and_nowhere_else(rig: Rig, pattern: str) -> None:
    rng = np.random.default_rng(3)
    remote, local = {
        "one": (np.array([5]), np.array([9])),
        "contiguous": (np.arange(20, 120), np.arange(33, 133)),
        "scattered": (rng.permutation(200)[:77], rng.permutation(217)[:77]),
        "backwards": (np.arange(100)[::-1], np.arange(50, 150)[::-1]),
        "interleaved": (np.arange(0, 200, 2), np.arange(100)),
        "all": (np.arange(200), np.arange(17, 217)),
    }[pattern]
    rig.target.blocks[:] = 0xEE
    result = rig.fetch(remote, local)
    assert result.valid.all()
    assert len(result.valid) == len(remote)
    assert result.num_bytes == len(remote) * LAYOUT.block_bytes
    assert (result.pipe_kind, result.fallback_reason) == (rig.kind, "")
    assert result.seconds > 0
    assert rig.same(remote, local)
    others = np.setdiff1d(np.arange(217), local)
    assert (rig.target.blocks[others] == 0xEE).all()


def test_the_same_block_to_many_places(rig: Rig) -> None:
    assert rig.fetch([3, 3, 4], [1, 2, 3]).valid.all()
    assert rig.same([3, 3, 4], [1, 2, 3])


def test_nothing_asked_nothing_moved(rig: Rig) -> None:
    result = rig.fetch([], [])
    assert (len(result.valid), result.num_bytes) == (0, 0)


def test_a_block_with_another_generation_is_not_valid_and_the_rest_is(rig: Rig) -> None:
    remote = np.array([4, 5, 6, 50])
    generations = rig.source_arena.generations[remote].copy()
    rig.source_arena.generations[5] += 1
    result = rig.fetch(remote, [0, 1, 2, 3], generations=generations)
    assert result.valid.tolist() == [True, False, True, True]
    assert result.num_bytes == 3 * LAYOUT.block_bytes
    assert rig.same([4, 6, 50], [0, 2, 3])


def test_no_block_of_a_mixed_generation_is_ever_called_valid(rig: Rig) -> None:
    """An owner who recycles blocks all the time: whatever is called valid is whole and of the generation asked for."""
    arena, stop = rig.source_arena, threading.Event()
    arena.generations[:] = 0
    arena.blocks[:] = 0

    def recycle() -> None:
        turn = 0
        while not stop.is_set():
            block = turn * 7 % 64
            arena.generations[block] += 1  # first the fence, then the content
            arena.blocks[block] = arena.generations[block] % 251
            turn += 1

    owner = in_thread(recycle)
    seen = 0
    try:
        end = time.monotonic() + 0.5
        while time.monotonic() < end or (not seen and time.monotonic() < end + 120):  # on a busy machine
            generations = arena.generations[:64].copy()
            settled = arena.blocks[np.arange(64), -1] == generations % 251  # offered only when complete
            ids = np.flatnonzero(settled)
            result = rig.fetch(ids, np.arange(len(ids)), generations=generations[ids])
            for at in np.flatnonzero(result.valid):
                assert (rig.target.blocks[at] == generations[ids[at]] % 251).all()
                seen += 1
    finally:
        stop.set()
        owner.result(240)
    assert seen > 0


def test_many_fetches_at_once(rig: Rig) -> None:
    def fetch(who: int) -> None:
        for i in range(12):
            local = np.arange(who * 25, who * 25 + 25)
            remote = np.random.default_rng(who * 100 + i).permutation(200)[:25]
            assert rig.fetch(remote, local).valid.all()
            assert rig.same(remote, local)

    with ThreadPoolExecutor(8) as pool:
        for call in [pool.submit(fetch, who) for who in range(8)]:
            call.result(240)
    assert len(rig.fetcher._links) == 1


@pytest.mark.parametrize(
    ("remote", "local", "generations", "field"),
    [
        ([200], [0], [0], "remote_ids"),
        ([-1], [0], [0], "remote_ids"),
        ([0], [217], [0], "local_ids"),
        ([0], [-1], [0], "local_ids"),
        ([0, 1], [3, 3], [0, 0], "local_ids"),
        ([0, 1], [3], [0, 0], "local_ids"),
        ([0, 1], [3, 4], [0], "generations"),
        ([0.5], [3], [0], "remote_ids"),
    ],
)
def test_bad_ids_are_refused_by_name_before_anything_moves(
    rig: Rig, remote: Any, local: Any, generations: Any, field: str
) -> None:
    rig.target.blocks[:] = 0xEE
    with pytest.raises(InvalidRequestError) as caught:
        rig.fetch(remote, local, generations=generations)
    assert caught.value.field == field
    assert (rig.target.blocks == 0xEE).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_digest", "e" * 64),
        ("kv_dtype", "bfloat16"),
        ("layer_shapes", (LayerShape(2, 16, 16), LayerShape(2, 16, 16))),
        ("rope", "other"),
        ("adapter", "lora"),
        ("kv_scales", "s"),
        ("layout", "v2"),
        ("hash_scheme", "x"),
        ("unsplit_layers", (1,)),
    ],
)
@pytest.mark.parametrize("lies", [False, True], ids=["known", "found-in-handshake"])
def test_another_fingerprint_is_refused_by_field(rig: Rig, field: str, value: Any, lies: bool) -> None:
    mine = dataclasses.replace(PRINT, **{field: value})
    source = rig.server.source
    if lies:  # the source's description says what the reader wants to hear; the server does not
        source = dataclasses.replace(source, fingerprint=mine)
    target = type(rig.target)(1, shard_layout(mine.geometry, ShardSpec(), mine.block_size).block_bytes)
    fetcher = BlockFetcher(target, mine, kinds=(rig.kind,), links=LinkOptions(memory=rig.network, tls=tls_of(rig.kind)))
    target.blocks[:] = 0xEE
    with pytest.raises(FingerprintMismatchError) as caught:
        fetcher.fetch(source, [0], [0], [0], deadline=soon())
    fetcher.close()
    assert caught.value.field == field
    assert (target.blocks == 0xEE).all()
    target.close()


@pytest.mark.parametrize(("field", "value"), [("tp_size", 2), ("pp_size", 2), ("block_size", 32)])
def test_a_source_of_another_shape_than_it_was_described_with_is_refused(rig: Rig, field: str, value: Any) -> None:
    lie = dataclasses.replace(rig.server.source, fingerprint=dataclasses.replace(PRINT, **{field: value}))
    generations = rig.source_arena.generations[:1]
    blocks = SequenceBlocks.pairs([0], generations, [0])
    with pytest.raises(FingerprintMismatchError) as caught:
        rig.fetcher.fetch_sequence(lie, blocks, deadline=soon())
    assert caught.value.field == "fingerprint"


def test_the_model_label_does_not_matter(rig: Rig) -> None:
    fetcher = BlockFetcher(
        rig.target,
        dataclasses.replace(PRINT, model="alias"),
        kinds=(rig.kind,),
        links=LinkOptions(memory=rig.network, tls=tls_of(rig.kind)),
    )
    generations = rig.source_arena.generations[:3]
    assert fetcher.fetch(rig.server.source, [0, 1, 2], generations, [0, 1, 2], deadline=soon()).valid.all()
    fetcher.close()


def test_another_number_of_blocks_is_refused_also_on_an_open_connection(rig: Rig) -> None:
    bigger = dataclasses.replace(rig.server.source, num_blocks=100_000)
    for _ in range(2):
        with pytest.raises(FingerprintMismatchError) as caught:
            rig.fetcher.fetch(bigger, [99_999], [0], [0], deadline=soon())
        assert caught.value.field == "num_blocks"
        rig.fetch([0], [0])


def test_another_epoch_is_stale(rig: Rig) -> None:
    old = dataclasses.replace(rig.server.source, epoch=Epoch(b"\1" * 16))
    with pytest.raises(StaleBlockError):
        rig.fetcher.fetch(old, [0], [0], [0], deadline=soon())


def test_a_restarted_source_is_stale_for_old_offers_and_serves_new_ones(rig: Rig) -> None:
    rig.fetch([0], [0])
    old = rig.server.source
    rig.server.close()
    first = rig.source_arena
    rig.source_arena = type(rig.target)(200, LAYOUT.block_bytes)
    rig.server = rig.serve()
    moved = BlockSource(old.instance_id, old.epoch, rig.server.source.endpoints, old.fingerprint, old.num_blocks)
    with pytest.raises((StaleBlockError, PipeClosedError)):
        rig.fetcher.fetch(moved, [0], [0], [0], deadline=soon())
    assert rig.fetch([1, 2], [1, 2]).valid.all()
    first.close()


def test_a_closed_server_is_gone_and_a_new_one_on_the_same_arena_is_found(rig: Rig) -> None:
    rig.fetch([0], [0])
    rig.server.close()
    with pytest.raises(PipeClosedError):
        rig.fetch([0], [0])
    rig.server = rig.serve()
    assert rig.fetch([0], [0]).valid.all()


def test_deadline_and_cancellation_before_the_start(rig: Rig) -> None:
    with pytest.raises(DeadlineError):
        rig.fetch([0], [0], deadline=time.monotonic() - 1)
    flag = threading.Event()
    flag.set()
    with pytest.raises(CancelledError):
        rig.fetch([0], [0], cancelled=flag)
    rig.fetch([0], [0])


def test_closing_the_fetcher_ends_it(rig: Rig) -> None:
    rig.fetch([0], [0])
    rig.fetcher.close()
    with pytest.raises(PipeClosedError):
        rig.fetch([0], [0])
    rig.fetcher.close()


async def test_fetch_async(rig: Rig) -> None:
    generations = rig.source_arena.generations[:50]
    result = await rig.fetcher.fetch_async(
        rig.server.source, SequenceBlocks.pairs(np.arange(50), generations, np.arange(50)), deadline=soon()
    )
    assert result.valid.all()
    assert rig.same(np.arange(50), np.arange(50))


async def test_fetch_async_is_bounded(tcp_rig: Rig) -> None:
    fetcher = BlockFetcher(tcp_rig.target, PRINT, kinds=("tcp",), max_threads=1)
    source = silent_source(tcp_rig)
    flag = threading.Event()
    calls = [
        asyncio.create_task(
            fetcher.fetch_async(source, SequenceBlocks.pairs([0], [0], [0]), deadline=soon(), cancelled=flag)
        )
        for _ in range(65)
    ]
    done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert [type(task.exception()) for task in done] == [QueueFullError]
    flag.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(r, CancelledError) for r in results) == 64
    fetcher.close()


async def test_a_cancelled_task_returns_only_when_nobody_writes_any_more(tcp_rig: Rig) -> None:
    fetcher = BlockFetcher(tcp_rig.target, PRINT, kinds=("tcp",))
    task = asyncio.create_task(
        fetcher.fetch_async(silent_source(tcp_rig), SequenceBlocks.pairs([0], [0], [0]), deadline=soon(240))
    )
    await asyncio.sleep(0.05)
    task.cancel()
    async with asyncio.timeout(240):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(fetcher._links._connecting) == 0
    fetcher.close()


def test_a_source_that_says_nothing_costs_no_more_than_the_deadline(tcp_rig: Rig) -> None:
    with pytest.raises(DeadlineError):
        tcp_rig.fetcher.fetch(silent_source(tcp_rig), [0], [0], [0], deadline=soon(0.1))
    flag = threading.Event()
    call = in_thread(
        lambda: tcp_rig.fetcher.fetch(silent_source(tcp_rig), [0], [0], [0], deadline=soon(), cancelled=flag)
    )
    flag.set()
    with pytest.raises(CancelledError):
        call.result(240)


async def test_closing_the_fetcher_ends_what_connects_and_what_waits(tcp_rig: Rig) -> None:
    fetcher = BlockFetcher(tcp_rig.target, PRINT, kinds=("tcp",), max_threads=1)
    source = silent_source(tcp_rig)
    calls = [
        asyncio.create_task(fetcher.fetch_async(source, SequenceBlocks.pairs([0], [0], [0]), deadline=soon(240)))
        for _ in range(3)
    ]
    await asyncio.sleep(0.05)
    await asyncio.to_thread(fetcher.close)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(r) for r in results] == [PipeClosedError] * 3  # and not the deadline
