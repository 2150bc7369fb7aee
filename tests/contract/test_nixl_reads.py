"""What NIXL's block reads add to the contract: what owners say of their arenas, readers who don't say they are done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.transport_rig import Rig, soon

from baton.errors import PipeClosedError
from baton.transport.block_types import BlockReads
from baton.transport.handshake import Facts
from baton.transport.pipe.nixl_agent import NixlAgent
from baton.transport.pipe.tcp_read import dial_reader
from baton.transport.read_wire import pack_request
from baton.transport.waiting import Wait
from baton.transport.wire import BadFrameError, FrameKind, pack_header, recv_control, recv_header


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig("nixl")
    yield rig
    rig.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("agent", ""),
        ("agent", "x" * 65),
        ("agent", None),
        ("metadata", "zz"),
        ("metadata", ""),
        ("metadata", "00" * 70_000),
        ("metadata", b"nonsense".hex()),
        ("arenas", []),
        ("arenas", [[1]]),
        ("arenas", [[0, 4096]]),
        ("arenas", [[-1, 4096]]),
        ("arenas", [["1", 4096]]),
        ("arenas", [[1 << 63, 4096]]),
        ("arenas", [[1, 4096]] * 2000),
    ],
)
def test_a_malformed_description_of_arenas_is_refused_by_its_field(
    rig: Rig, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = rig.server._nixl
    assert source is not None
    real = source._describe()
    monkeypatch.setattr(source, "_describe", lambda: real | {name: value})
    with pytest.raises(BadFrameError) as caught:
        rig.fetch([1], [2])
    assert caught.value.field == name


def test_arenas_that_are_elsewhere_than_described_cannot_be_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    source = rig.server._nixl
    assert source is not None
    real: dict[str, Any] = source._describe()
    moved = [[address + (1 << 40), size] for address, size in real["arenas"]]
    monkeypatch.setattr(source, "_describe", lambda: real | {"arenas": moved})
    with pytest.raises(PipeClosedError, match="cannot be read"):
        rig.fetch([1], [2])
    monkeypatch.undo()
    assert rig.fetch([1], [2]).valid.all()
    assert rig.same([1], [2])


@pytest.mark.parametrize("instead", [b"garbage, and no frame of ours", pack_header(FrameKind.READ, 8) + b"\0" * 8, b""])
def test_a_reader_who_does_not_say_it_is_done_loses_its_connection_alone(rig: Rig, instead: bytes) -> None:
    source = rig.server.source
    facts = Facts(source.epoch, source.fingerprint, source.num_blocks)
    stream = dial_reader(source.endpoints[0].address, facts, None, Wait(soon()))
    assert recv_control(stream, FrameKind.WELCOME, Wait(soon()))["agent"]
    request = pack_request(BlockReads.of([3], rig.source_arena.generations[[3]], [0]), checksums=False)
    stream.send_all([pack_header(FrameKind.READ, len(request)), request], Wait(soon()), "asking")
    _, length = recv_header(stream, {FrameKind.BLOCKS: 1}, Wait(soon()))
    assert bytes(stream.recv_exact(length, Wait(soon()), "answer")) == b"\x01"
    if instead:
        stream.send_all([instead], Wait(soon()), "misbehaving")
        with pytest.raises(BadFrameError):
            recv_header(stream, {FrameKind.BLOCKS: 1}, Wait(soon()))
    stream.close()
    assert rig.fetch([1], [2]).valid.all()


def test_an_agent_that_ends_is_replaced(rig: Rig) -> None:
    ids = np.arange(50)
    assert rig.fetch(ids, ids).valid.all()
    link = next(iter(rig.fetcher._links._links.values()))
    agents: list[NixlAgent] = [agent for agent, _ in link.pipe._met]  # type: ignore[attr-defined]
    agents[0].close()
    assert rig.fetch(ids, ids + 60).valid.all()
    assert rig.same(ids, ids + 60)
