"""NIXL from and into arenas in device memory, which memory of the host stands in for.

NIXL's agents are real. Here UCX has no CUDA: what is said of GPUs is that memory of the host is given a GPU's index.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from tests.support.transport.fake_device import StandInArena
from tests.support.transport.kv_pair import RESHARDED, Pair

from baton.errors import ConfigError
from baton.kv_cache.arena import MemoryRange
from baton.kv_cache.layout import LayerShape
from baton.kv_transfer.blocks import BlockServer
from baton.kv_transfer.pipes import nixl, nixl_agent, registry
from baton.kv_transfer.pipes.base import PipeOptions
from baton.kv_transfer.wire import BadFrameError
from baton.types import InstanceId

pytest.importorskip("nixl_cu12")
GPU = 3


class OnGpu(StandInArena):
    """Says that its blocks are a GPU's."""

    def memory_range(self) -> MemoryRange:
        where = super().memory_range()
        return MemoryRange(where.address, where.size, GPU)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What NIXL is asked to register and to copy, by the kind of memory."""
    found: list[tuple[str, Any]] = []
    agent = nixl_agent._import_nixl().nixl_agent
    for name in ("register_memory", "get_xfer_descs"):
        real = getattr(agent, name)

        def recorded(self: Any, rows: Any, kind: str, *more: Any, real: Any = real, **named: Any) -> Any:
            found.append((kind, [tuple(int(value) for value in row[:3]) for row in rows]))
            return real(self, rows, kind, *more, **named)

        monkeypatch.setattr(agent, name, recorded)
    return found


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas that say they are a GPU's, and agents that register them as what they are."""
    monkeypatch.setattr(nixl_agent, "_REFUSED_DEVICES", {})
    monkeypatch.setattr("tests.support.transport.kv_pair.StandInArena", OnGpu)
    for module in (nixl_agent, nixl):
        monkeypatch.setattr(module, "segment_type", lambda where: "DRAM")


@pytest.mark.parametrize("ends", [(True, True), (True, False), (False, True)])
def test_blocks_travel_without_a_copy_by_way_of_the_host(
    ends: tuple[bool, bool], on_gpu: None, calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("read_into", "write_from"):
        monkeypatch.delattr(StandInArena.__mro__[1], name)
    pair = Pair("nixl", 1, RESHARDED, ("float32", "float32"), on_device=ends)
    try:
        result = pair.fetch()
        assert (result.valid.all(), result.pipe_kind) == (True, "nixl")
        assert pair.right()
        registered = [{row[2] for row in rows} for _, rows in calls]
        gpus = {GPU if end else 0 for end in ends}
        assert set().union(*registered) == gpus  # every row has its memory's device, or NIXL would not find it
    finally:
        pair.close()


def test_layers_are_followed_and_recycled_blocks_are_not_valid() -> None:
    layers = (LayerShape(4, 6, 4),) * 8
    pair = Pair("nixl", 1, RESHARDED, ("float32", "float32"), layers, on_device=(True, True))
    try:
        assert pair.fetch_as_computed().valid.all()
        assert pair.right()
        assert np.flatnonzero(~pair.fetch_recycled(4).valid).tolist() == [4]
    finally:
        pair.close()


def test_both_devices_have_done_what_is_queued_before_bytes_move(
    calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[Any] = []
    pair = Pair("nixl", dtypes=("float32", "float32"), on_device=(True, True))
    source, generations = pair.source.shards.arenas, pair.source.shards.primary.generations
    agents, read = nixl_agent.NixlAgent, nixl_agent.NixlAgent.read

    def settle(arena: StandInArena) -> None:
        order.append("source" if arena in source else "target")
        if arena in source:  # a block that was given away before its device has settled
            generations[2] += 1

    def reading(self: Any, *arguments: Any, **named: Any) -> None:
        order.append("read")
        read(self, *arguments, **named)

    monkeypatch.setattr(StandInArena, "settle", settle)
    monkeypatch.setattr(agents, "read", reading)
    try:
        result = pair.fetch()
        assert np.flatnonzero(~result.valid).tolist() == [2]
        assert order.index("source") < order.index("read")
        assert order.index("target") < order.index("read")
    finally:
        pair.close()


def test_memory_that_nixl_cannot_register_is_refused_by_name_and_left_out_of_auto(
    calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nixl_agent, "_REFUSED_DEVICES", {})
    monkeypatch.setattr(nixl, "infiniband_ports", lambda: ("mlx5_0",))
    pair = Pair("tcp", on_device=(False, False))
    arena = OnGpu(4, 4096)
    options = PipeOptions(host_memory=False, arena=arena)
    with caplog.at_level(logging.WARNING):
        assert registry.resolve_kinds("auto", options) == ("cuda_ipc", "tcp")
    assert "the nixl pipe takes no blocks in the memory of cuda:3" in caplog.text
    assert calls == [("VRAM", [(arena.memory.data_ptr(), 4 * 4096, GPU)])]
    with pytest.raises(ConfigError, match="it needs NIXL with CUDA") as caught:
        registry.resolve_kinds(("nixl",), options)
    assert caught.value.field == "pipes"
    # Blocks from elsewhere still come over NIXL, by way of host memory.
    assert registry.resolve_kinds(("nixl",), PipeOptions(arena=arena)) == ("nixl",)
    assert not nixl.NixlReadPipe.reaches(object.__new__(nixl.NixlReadPipe), arena)
    assert len(calls) == 1  # tried once
    host = PipeOptions(host_memory=True, arena=pair.source.shards.primary)
    assert registry.resolve_kinds("auto", host) == ("shm", "nixl", "tcp")
    pair.close()


@pytest.mark.parametrize("devices", [7, [], [0, 0, 0], ["0", 0], [-1, 0], [True, 0]])
def test_malformed_devices_are_refused_by_their_field(devices: object) -> None:
    with pytest.raises(BadFrameError) as caught:
        nixl.parse_arenas([[1, 4096], [8192, 4096]], devices)
    assert caught.value.field == "devices"


def test_a_server_of_what_has_no_addresses_is_refused() -> None:
    pair = Pair("tcp", on_device=(True, False))
    with pytest.raises(ConfigError, match="host memory only"):
        BlockServer(pair.source.shards, pair.source.print, InstanceId("d"), kinds=("nixl",))
    pair.close()
