"""Sources and targets of ``baton bench kv`` in memory that stands in for a device's, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.support.transport.transport_rig import in_thread

from baton.errors import ConfigError
from baton.kv_cache.arena import whole_blocks
from baton.kv_cache.layout import LayerShape
from baton.kv_cache.shards import KVGeometry
from baton_bench.kv.agent import Source, Target
from baton_bench.kv.memory import new_arena
from baton_bench.kv.plan import (
    Ends,
    Options,
    RunSpec,
    Shape,
    SourceSpec,
    TargetSpec,
    model_stage,
    parse_memory,
    reference_stage,
    small_stage,
)
from baton_bench.kv.rivals import NixlEnd

HERE, DEVICE = "host", "interpret"
PAIRS = {(DEVICE, DEVICE): ("cuda_ipc", "tcp"), (DEVICE, HERE): ("tcp",), (HERE, DEVICE): ("shm", "tcp", "gloo")}
GEOMETRY = KVGeometry((LayerShape(4, 16, 16), LayerShape(2, 16, 8)), "float16", frozenset())
SHAPE = Shape.of(GEOMETRY, 4)
BLOCKS = 6


@contextmanager
def opened(
    source: str, target: str, kinds: tuple[str, ...], there: Shape = SHAPE, here: Shape = SHAPE
) -> Iterator[tuple[Source, Target]]:
    first = Source(SourceSpec(0, 3, there, BLOCKS, kinds, source), "127.0.0.1", None)
    try:
        blocks = here.num_blocks(BLOCKS * there.block_size)
        second = Target(TargetSpec(0, 3, here, blocks, (first.facts(),), target, source), None)
        try:
            yield first, second
        finally:
            second.close()
    finally:
        first.close()


@pytest.mark.parametrize("pair", PAIRS)
def test_every_pipe_and_bare_copy_moves_the_bytes(pair: tuple[str, str]) -> None:
    with opened(*pair, PAIRS[pair]) as (_, target):
        for kind in PAIRS[pair]:
            assert target.run(RunSpec(kind, 1, BLOCKS, True, True, True)).wrong == 0
        assert len(target.fetches(PAIRS[pair][0], 2, 5.0)["seconds"]) >= 1
        size = BLOCKS * SHAPE.layouts()[0].block_bytes
        for name in ("memcpy", "memcpy-blocks", "socket"):
            for shuffled in (False, True):
                assert target.run(RunSpec(name, 1, BLOCKS, shuffled)).bytes == size


@pytest.mark.parametrize("pair", [(DEVICE, DEVICE), (DEVICE, HERE)])
def test_a_wrong_byte_is_found_whatever_the_shapes(pair: tuple[str, str]) -> None:
    with opened(*pair, ("tcp",), Shape.of(GEOMETRY, 4, 2), Shape.of(GEOMETRY, 8, 1, 2)) as (source, target):
        run = RunSpec("tcp", 1, BLOCKS, True, True, True)
        assert target.run(run).wrong == 0
        arena: Any = source.shards.arenas[1]
        arena.memory[5, 77] ^= 1
        assert target.run(run).wrong == 1


@pytest.mark.parametrize("where", [(DEVICE, DEVICE), (DEVICE, HERE)])
def test_plain_nixl_registers_what_stands_in_for_a_device(where: tuple[str, str]) -> None:
    pytest.importorskip("nixl_cu12")
    arenas = [new_arena(memory, 4, 512) for memory in where]
    data = np.arange(4 * 512, dtype=np.uint8)
    arenas[0].write_from(data, whole_blocks(range(4), 512))
    source, target = NixlEnd(arenas[0], "source"), NixlEnd(arenas[1], "target")
    assert source.card()["device"] == -1
    source.meet(target.card())
    target.meet(source.card())
    call = in_thread(target.prepare(RunSpec("nixl-bare", 1, 4, True), np.arange(4), np.array([2, 0, 3, 1])))
    while not call.done():
        source.progress()
    call.result(240)
    out = np.empty(4 * 512, np.uint8)
    arenas[1].read_into(out, whole_blocks([2, 0, 3, 1], 512))
    assert np.array_equal(out, data)
    target.close()
    source.close()


def test_which_memories_are_meant() -> None:
    assert parse_memory("cuda") == ("cuda:0", "cuda:0")
    assert parse_memory("cuda:1,cuda:0") == ("cuda:1", "cuda:0")
    assert [ends.label for ends in Options(memory="cuda:0,cuda:1").ends] == [
        "cuda:0 to cuda:1", "cuda:0 to host", "host to cuda:1",
    ]  # fmt: skip
    assert [ends.label for ends in Options().ends] == ["host"]
    for wrong in ("gpu", "host,cuda", "cuda,cuda,cuda", "cuda:x", ""):
        with pytest.raises(ConfigError, match="--memory"):
            Options(memory=wrong)


def test_what_triton_interprets_is_compared_on_few_blocks() -> None:
    cuda, few = Ends("cuda:0", "host"), Ends("host", DEVICE)
    assert reference_stage(cuda) == reference_stage(Ends()).__class__(**{**vars(reference_stage(Ends())), "ends": cuda})
    assert [case.blocks for case in reference_stage(few).cases] == [16, 8]
    assert small_stage(few).source_blocks == 2
    assert model_stage(Options(memory="cuda"), cuda).ends is cuda
