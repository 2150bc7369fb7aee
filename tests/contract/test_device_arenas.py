"""Hand-over from and into arenas that the host cannot address: the same blocks as between arenas in host memory."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.support.transport.fake_device import FakeDeviceArena
from tests.support.transport.kv_pair import RESHARDED, Pair, Shape
from tests.support.transport.transport_rig import in_thread, soon

from baton.errors import BatonError, ConfigError
from baton.kv_cache.layout import LayerShape
from baton.kv_transfer.blocks import BlockServer, ServerOptions
from baton.kv_transfer.blocks.staging import Staging
from baton.types import InstanceId

SAME: tuple[Shape, Shape] = ((1, 1, 16), (1, 1, 16))
WAYS = [
    pytest.param(("memory", (True, False)), id="memory-from-device"),
    pytest.param(("memory", (True, True)), id="memory-both"),
    pytest.param(("shm", (False, True)), id="shm-to-device"),
    pytest.param(("tcp", (True, False)), id="tcp-from-device"),
    pytest.param(("tcp", (False, True)), id="tcp-to-device"),
    pytest.param(("tcp", (True, True)), id="tcp-both"),
    pytest.param(("tls", (True, True)), id="tls-both"),
    pytest.param(("cuda_ipc", (True, True)), id="cuda_ipc-both"),
]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[str, tuple[bool, bool]]:
    found: tuple[str, tuple[bool, bool]] = request.param
    return found


def copied(arena: Any) -> int:
    assert isinstance(arena, FakeDeviceArena)
    return arena.copied_bytes


@pytest.mark.parametrize("shapes", [SAME, RESHARDED, ((4, 1, 16), (2, 2, 32)), ((2, 2, 24), (1, 1, 16))])
@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("int8", "int8"),
        ("bfloat16", "int8"),
        ("int8", "float32"),
    ],
)
def test_every_block_is_equal(way: Any, shapes: tuple[Shape, Shape], dtypes: tuple[str, str]) -> None:
    pair = Pair(way[0], 1, shapes, dtypes, on_device=way[1])
    result = pair.fetch()
    assert (result.valid.all(), result.pipe_kind) == (True, way[0])
    assert pair.right()
    pair.close()


@pytest.mark.parametrize("area", [64, 1 << 10])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("int8", "float32")])
def test_blocks_bigger_than_a_staging_area_come_in_parts(way: Any, area: int, dtypes: tuple[str, str]) -> None:
    pair = Pair(way[0], 1, RESHARDED, dtypes, on_device=way[1])
    pair.fetcher._staging, pair.fetcher._device_staging = Staging(area_bytes=area), Staging(area_bytes=area)
    assert pair.fetch().valid.all()
    assert pair.right()
    pair.close()


def test_layers_are_followed_as_they_are_computed(way: Any) -> None:
    layers = (LayerShape(4, 6, 4),) * 8
    pair = Pair(way[0], 1, RESHARDED, ("float32", "float32"), layers, on_device=way[1])
    assert pair.fetch_as_computed().valid.all()
    assert pair.right()
    pair.close()


def test_what_is_held_already_is_not_written(way: Any) -> None:
    pair = Pair(way[0], 1, SAME, ("float32", "float32"), on_device=way[1])
    for memory in pair.target.memories():
        memory[:] = 0xEE
    assert pair.fetch(held=3).valid.all()
    assert pair.right(first=3)
    assert all((memory[:3] == 0xEE).all() for memory in pair.target.memories())
    pair.close()


def test_a_recycled_block_is_not_valid_and_never_reaches_the_device(way: Any) -> None:
    pair = Pair(way[0], 1, SAME, ("float32", "float32"), on_device=way[1])
    for memory in pair.target.memories():
        memory[:] = 0xEE
    assert np.flatnonzero(~pair.fetch_recycled(4).valid).tolist() == [4]
    if way[1][1]:
        assert (pair.target.memories()[0][4] == 0xEE).all()
    pair.close()


@pytest.mark.parametrize("kind", ["memory", "tcp", "tls"])
def test_a_block_recycled_while_it_is_copied_is_not_valid(kind: str, monkeypatch: Any) -> None:
    pair = Pair(kind, 1, SAME, ("float32", "float32"), on_device=(True, False))
    arena, real = pair.source.shards.primary, FakeDeviceArena.read_into

    def read_into(self: FakeDeviceArena, target: Any, spans: Any) -> None:
        real(self, target, spans)
        if self is arena and 2 in spans[:, 0]:
            arena.generations[2] += 1

    monkeypatch.setattr(FakeDeviceArena, "read_into", read_into)
    assert np.flatnonzero(~pair.fetch().valid).tolist() == [2]
    pair.close()


def test_a_cancelled_fetch_leaves_no_staging_area_behind(way: Any) -> None:
    pair = Pair(way[0], 1, SAME, ("float32", "float32"), on_device=way[1])
    flag = threading.Event()
    call = in_thread(
        lambda: pair.fetcher.fetch_sequence(pair.server.source, pair.blocks(ready=0), deadline=soon(), cancelled=flag)
    )
    flag.set()
    with pytest.raises(BatonError):
        call.result(240)
    staging = pair.fetcher._device_staging
    assert staging.num_free() == staging.num_areas
    pair.close()


def test_only_what_is_asked_for_leaves_the_device() -> None:
    pair = Pair("tcp", 1, SAME, ("float32", "float32"), on_device=(True, False))
    arena = pair.source.shards.primary
    pair.fetch(held=pair.target.blocks - 2)
    assert copied(arena) == 2 * arena.block_bytes
    pair.close()


@pytest.mark.parametrize("kind", ["shm", "nixl", "gloo"])
def test_kinds_that_serve_host_memory_only_say_so_and_auto_passes_them_over(kind: str) -> None:
    pair = Pair("tcp", on_device=(True, False))
    shards, fingerprint = pair.source.shards, pair.source.print
    with pytest.raises(ConfigError, match="host memory only") as caught:
        BlockServer(shards, fingerprint, InstanceId("d"), kinds=(kind, "tcp"))
    assert caught.value.field == "pipes"
    server = BlockServer(shards, fingerprint, InstanceId("d"), kinds="auto", options=ServerOptions())
    assert [endpoint.kind for endpoint in server.endpoints] == ["tcp"]
    server.close()
    pair.close()
