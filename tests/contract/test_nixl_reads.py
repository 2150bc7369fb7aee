"""What NIXL's block reads add to the contract: what owners say of their arenas, readers who don't say they are done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.transport.transport_rig import Rig, soon

from baton.errors import ConfigError, PipeClosedError
from baton.kv_transfer.pipes import nixl
from baton.kv_transfer.pipes.base import FollowingReadPipe, LayerRead
from baton.kv_transfer.pipes.nixl_agent import NixlAgent, describe_agent
from baton.kv_transfer.pipes.tcp import dial_reader
from baton.kv_transfer.streams import Stream, Wait
from baton.kv_transfer.types import BlockReads
from baton.kv_transfer.wire import BadFrameError, Facts, FrameKind, pack_header, pack_request, recv_control, recv_header


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
        ("digest", "0" * 64),
        ("digest", 7),
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
    source = rig.server._servers[0]
    assert isinstance(source, nixl.NixlServer)
    real = source._describe()
    monkeypatch.setattr(source, "_describe", lambda: real | {name: value})
    with pytest.raises(BadFrameError) as caught:
        rig.fetch([1], [2])
    assert caught.value.field == ("metadata" if name == "digest" else name)


def test_metadata_that_came_damaged_once_spoil_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    source = rig.server._servers[0]
    assert isinstance(source, nixl.NixlServer)
    real = source._describe()
    for damaged in (real["metadata"][:-40], real["metadata"][:-2], real["metadata"][:-40] + "00" * 20):
        monkeypatch.setattr(source, "_describe", lambda damaged=damaged: real | {"metadata": damaged})
        with pytest.raises(BadFrameError):
            rig.fetch([1], [2])
        monkeypatch.undo()
    assert rig.fetch([1], [2]).valid.all()
    assert rig.same([1], [2])


def test_a_peer_whose_metadata_nixl_refused_is_met_by_another_agent(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    source = rig.server._servers[0]
    assert isinstance(source, nixl.NixlServer)
    real = source._describe()
    cut = describe_agent(real["agent"], bytes.fromhex(real["metadata"])[:-20])  # whole, as far as the digest can tell
    other = Rig("nixl")  # another peer, whose connection lives on
    try:
        rig.fetcher._links._dialer._kinds = other.fetcher._links._dialer._kinds
        assert other.fetch([1], [2]).valid.all()
        for _ in range(nixl.AGENTS):
            monkeypatch.setattr(source, "_describe", lambda: real | cut)
            with pytest.raises(BadFrameError, match="NIXL refuses"):
                rig.fetch([1], [2])
            monkeypatch.undo()
            assert other.fetch([1], [3]).valid.all()
        assert rig.fetch([1], [2]).valid.all()
        assert rig.same([1], [2])
        assert other.fetch([1], [4]).valid.all()
    finally:
        other.close()


def test_the_agents_that_refusals_may_cost_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "AGENTS", 1)
    monkeypatch.setattr(nixl, "MAX_RETIRED", 1)
    targets = nixl.NixlTargets()
    for _ in range(2):
        targets.agent("127.0.0.1").refused = True
    with pytest.raises(ConfigError, match="refused"):
        targets.agent("127.0.0.1")
    targets.close()


def test_arenas_that_are_elsewhere_than_described_cannot_be_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    source = rig.server._servers[0]
    assert isinstance(source, nixl.NixlServer)
    real: dict[str, Any] = source._describe()
    moved = [[address + (1 << 40), size] for address, size in real["arenas"]]
    monkeypatch.setattr(source, "_describe", lambda: real | {"arenas": moved})
    with pytest.raises(PipeClosedError, match="cannot be read"):
        rig.fetch([1], [2])
    monkeypatch.undo()
    assert rig.fetch([1], [2]).valid.all()
    assert rig.same([1], [2])


@pytest.mark.parametrize(
    "instead",
    [
        b"garbage, and no frame of ours",
        pack_header(FrameKind.READ, 8) + b"\0" * 8,
        pack_header(FrameKind.WAIT, 4) + b"\0" * 4,
        b"",
    ],
)
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


def followed(rig: Rig, layers: int) -> LayerRead:
    """Ten blocks of the rig's, cut into so many layers, the first of which is there at 1."""
    ids, size = np.arange(10), rig.target.block_bytes // layers
    segments = np.array([[layer * size, layer * size, size] for layer in range(layers)])
    steps = np.array([[layer + 1, 1] for layer in range(layers)])
    generations = rig.source_arena.generations[ids]
    return LayerRead(BlockReads(ids, generations, ids, segments, 0, steps), rig.target.blocks)


def test_layers_that_are_there_are_read_at_once_and_the_next_are_asked_for_meanwhile(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.fetch([1], [1])
    pipe = next(iter(rig.fetcher._links._links.values())).pipe
    assert isinstance(pipe, FollowingReadPipe)
    progress, rows, asked = rig.source_arena.progress, list[int](), list[int]()
    real_read, real_ask = NixlAgent.read, nixl.request_progress

    def read(agent: NixlAgent, peer: str, where: Any, *args: Any, **named: Any) -> None:
        rows.append(int(where[0][:, 1].sum()))
        assert asked[-1] == 4  # for what the source computes while we read
        real_read(agent, peer, where, *args, **named)
        progress.advance(8)

    def ask(stream: Stream, value: int, wait: Wait) -> None:
        asked.append(value)
        real_ask(stream, value, wait)

    monkeypatch.setattr(NixlAgent, "read", read)
    monkeypatch.setattr(nixl, "request_progress", ask)
    progress.advance(3)
    (valid,), waited_s = pipe.follow([followed(rig, 8)], Wait(soon()))
    assert valid.all()
    assert waited_s >= 0
    size = rig.target.block_bytes // 8 * 10
    assert (rows, asked) == ([3 * size, 5 * size], [1, 4])
    assert rig.same(np.arange(10), np.arange(10))


def test_blocks_that_are_stale_from_the_start_are_not_waited_for(rig: Rig) -> None:
    rig.fetch([1], [1])
    pipe = next(iter(rig.fetcher._links._links.values())).pipe
    assert isinstance(pipe, FollowingReadPipe)
    each = followed(rig, 8)
    rig.source_arena.generations[:10] += np.uint64(1)
    (valid,), _ = pipe.follow([each], Wait(soon()))
    assert not valid.any()


def test_the_owner_drives_its_agent_while_a_reader_waits_for_layers(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.fetch([1], [1])
    pipe = next(iter(rig.fetcher._links._links.values())).pipe
    assert isinstance(pipe, FollowingReadPipe)
    source = rig.server._servers[0]
    assert isinstance(source, nixl.NixlServer)
    calls, progress = [0], rig.source_arena.progress
    real = source._agent.progress

    def drive() -> None:
        calls[0] += 1
        if calls[0] == 20:  # the last layers come when the owner has driven its agent for a while
            progress.advance(8)
        real()

    monkeypatch.setattr(source._agent, "progress", drive)
    progress.advance(1)
    (valid,), waited_s = pipe.follow([followed(rig, 8)], Wait(soon()))
    assert valid.all()
    assert waited_s > 0
    assert rig.same(np.arange(10), np.arange(10))


def test_connections_take_turns_at_several_agents() -> None:
    targets = nixl.NixlTargets()
    first = [targets.agent("127.0.0.1") for _ in range(nixl.AGENTS)]
    assert len(set(first)) == nixl.AGENTS
    assert [targets.agent("127.0.0.1") for _ in range(nixl.AGENTS)] == first
    blocks = np.zeros((4, 4096), np.uint8)
    regions = [targets.region(agent, blocks) for agent in first]
    assert [targets.region(agent, blocks) for agent in first] == regions  # registered once each
    assert regions[0] is not regions[1]
    first[0].close()
    again = {targets.agent("127.0.0.1") for _ in range(nixl.AGENTS)}
    assert first[0] not in again
    assert first[1] in again
    targets.close()
    assert all(agent.closed for agent in again)


def test_an_agent_that_ends_is_replaced(rig: Rig) -> None:
    ids = np.arange(50)
    assert rig.fetch(ids, ids).valid.all()
    link = next(iter(rig.fetcher._links._links.values()))
    agents: list[NixlAgent] = [agent for agent, _ in link.pipe._met]  # type: ignore[attr-defined]
    agents[0].close()
    assert rig.fetch(ids, ids + 60).valid.all()
    assert rig.same(ids, ids + 60)
