"""The NIXL agent: reads end before their caller goes on, strange metadata is refused, a no has a reason."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from tests.support.child_env import child_env
from tests.support.transport.transport_rig import Rig, lets_go, open_fds, soon

from baton.errors import ConfigError, DeadlineError, PipeClosedError
from baton.kv_transfer.pipes import nixl, nixl_agent
from baton.kv_transfer.pipes.base import MemoryNetwork, PipeOptions
from baton.kv_transfer.pipes.nixl_agent import (
    MAX_METADATA_BYTES,
    NixlAgent,
    Region,
    Rows,
    describe_agent,
    parse_agent,
    progress_until_readable,
)
from baton.kv_transfer.pipes.registry import obstacle, resolve_kinds
from baton.kv_transfer.streams import Stream, Wait
from baton.kv_transfer.wire import BadFrameError


def streams() -> tuple[Stream, Stream]:
    a, b = socket.socketpair()
    return Stream(a, peer="a"), Stream(b, peer="b")


def region(agent: NixlAgent, size: int) -> Region:
    return agent.register(np.zeros(size, np.uint8))


def rows(to: Region, source: Region, size: int) -> tuple[Rows, Rows]:
    here, there = (np.array([[each.memories[0].ctypes.data, size, 0]], np.uint64) for each in (to, source))
    return here, there


def test_one_agent_reads_anothers_memory_while_that_attends() -> None:
    owner, reader = NixlAgent(), NixlAgent()
    source, target = region(owner, 1 << 20), region(reader, 1 << 20)
    source.memories[0][:] = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    mine, theirs = streams()
    reader.connect(owner.name, source.metadata)
    attending = threading.Thread(target=progress_until_readable, args=(owner, theirs, Wait(soon()), "attending"))
    attending.start()
    reader.read(owner.name, rows(target, source, 1 << 20), target, mine, Wait(soon()))
    assert np.array_equal(target.memories[0], source.memories[0])
    mine.send_all([b"."], Wait(soon()), "saying so")
    attending.join(240)
    assert not attending.is_alive()
    elsewhere = np.array([[4096, 100, 0]], np.uint64)
    with pytest.raises(PipeClosedError, match="cannot be read"):
        reader.read(owner.name, (rows(target, source, 100)[0], elsewhere), target, mine, Wait(soon()))
    reader.disconnect(owner.name)  # and forgotten, since a read failed
    with pytest.raises(PipeClosedError, match="cannot be read"):
        reader.read(owner.name, rows(target, source, 100), target, mine, Wait(soon()))
    mine.close()
    theirs.close()
    owner.close()
    reader.close()


def test_metadata_that_is_not_the_peers_is_refused() -> None:
    owner, reader = NixlAgent(), NixlAgent()  # none that others use: NIXL keeps half of what was cut, for good
    source = region(owner, 4096)
    for name, metadata in (
        (owner.name, b""),
        (owner.name, b"garbage" * 20),
        (owner.name, source.metadata[:-20]),
        ("somebody", source.metadata),
        (reader.name, source.metadata),
    ):
        with pytest.raises(BadFrameError):
            reader.connect(name, metadata)
    owner.close()
    reader.close()


def test_a_closed_agent_says_so() -> None:
    agent = NixlAgent()
    agent.close()
    agent.close()
    assert agent.closed
    for call in (agent.progress, lambda: region(agent, 4096), lambda: agent.connect("x", b"y")):
        with pytest.raises(PipeClosedError):
            call()


def meet_often() -> None:
    """Connections that come and go, over sockets; run with ``UCX_TLS=tcp``."""
    rig, open_before = Rig("nixl"), 0
    for turn in range(12):
        assert rig.fetch([1, 2], [3, 4]).valid.all()
        for link in list(rig.fetcher._links._links.values()):
            rig.fetcher._links.drop(link)
        if turn == 3:
            open_before = open_fds()
    assert lets_go(open_before + 2), "one or more with every connection"  # UCX's threads may open one of their own late


def read_that_never_ends() -> None:
    """Over sockets a read needs its owner's progress, which never comes here; run with ``UCX_TLS=tcp``."""
    owner, reader = NixlAgent(), NixlAgent()
    source, target = region(owner, 1 << 20), region(reader, 1 << 20)
    source.memories[0][:] = 7
    mine, _theirs = streams()
    reader.connect(owner.name, source.metadata)
    began = time.monotonic()
    try:
        reader.read(owner.name, rows(target, source, 1 << 20), target, mine, Wait(soon(0.2)))
    except DeadlineError:
        assert time.monotonic() - began < 2 * nixl_agent.DRAIN_S + 20
    else:
        raise AssertionError("the read ended")
    assert len(target.stuck) == 1
    reader.close()
    end = soon(0.3)
    while time.monotonic() < end:
        owner.progress()
    assert not target.memories[0].any()
    owner.close()


@pytest.mark.parametrize("what", ["read_that_never_ends", "meet_often"])
def test_over_sockets(what: str) -> None:
    code = f"from tests.unit.kv_transfer.test_nixl_agent import {what}; {what}()"
    env = child_env(UCX_TLS="tcp")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_nixl_the_pipe_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_MODULES", ("no_such_nixl",))
    assert "pip install 'baton-serve[nixl]'" in obstacle("nixl")
    with pytest.raises(ConfigError, match="baton-serve") as caught:
        resolve_kinds(("nixl", "tcp"))
    assert caught.value.field == "pipes"
    with pytest.raises(ConfigError, match="baton-serve"):
        NixlAgent()


def test_auto_takes_nixl_where_there_is_infiniband(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "infiniband_ports", list)
    assert resolve_kinds("auto") == ("shm", "tcp")
    monkeypatch.setattr(nixl, "infiniband_ports", lambda: ["mlx5_0:1"])
    assert resolve_kinds("auto") == ("shm", "nixl", "tcp")
    options = PipeOptions(memory=MemoryNetwork())
    assert resolve_kinds(("tcp", "auto"), options) == ("tcp", "memory", "shm", "nixl")
    monkeypatch.setattr(nixl_agent, "_MODULES", ("no_such_nixl",))
    assert resolve_kinds(("auto",)) == ("shm", "tcp")


def test_the_vm_pipe_is_refused_with_what_to_use() -> None:
    with pytest.raises(ConfigError, match="use shm") as caught:
        resolve_kinds(("vm", "tcp"))
    assert caught.value.field == "pipes"


@pytest.mark.parametrize("kinds", [(), ("pigeon",), ("tcp", "tcp"), "", ("auto", "auto")])
def test_kinds_that_make_no_sense_are_refused(kinds: object) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_kinds(kinds)  # type: ignore[arg-type]
    assert caught.value.field == "pipes"


NAME, METADATA = "baton-0123456789abcdef", bytes(range(256)) * 2


def test_what_was_said_is_read() -> None:
    assert parse_agent(describe_agent(NAME, METADATA) | {"arenas": []}) == (NAME, METADATA)
    assert parse_agent(describe_agent("x" * 64, b"x" * MAX_METADATA_BYTES))[1] == b"x" * MAX_METADATA_BYTES


@pytest.mark.parametrize("length", [*range(20), 255, 256, 257, *range(492, 512)])
def test_metadata_cut_short_anywhere_is_refused(length: int) -> None:
    said = describe_agent(NAME, METADATA)
    with pytest.raises(BadFrameError) as caught:
        parse_agent(said | {"metadata": said["metadata"][: 2 * length]})
    assert caught.value.field == "metadata"


@pytest.mark.parametrize("at", range(0, len(METADATA), 7))
def test_a_changed_byte_is_noticed(at: int) -> None:
    changed = bytearray(METADATA)
    changed[at] ^= 1 << at % 8
    with pytest.raises(BadFrameError):
        parse_agent(describe_agent(NAME, METADATA) | {"metadata": changed.hex()})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("agent", None),
        ("agent", "x" * 65),
        ("agent", "ü"),
        ("agent", "\ud800"),
        ("metadata", METADATA),
        ("metadata", "0"),
        ("metadata", "00" * (MAX_METADATA_BYTES + 1)),
    ],
)
def test_what_is_no_description_is_refused_by_its_field(field: str, value: object) -> None:
    with pytest.raises(BadFrameError) as caught:
        parse_agent(describe_agent(NAME, METADATA) | {field: value})
    assert caught.value.field == field


def test_one_agents_metadata_are_not_anothers() -> None:
    with pytest.raises(BadFrameError):
        parse_agent(describe_agent(NAME, METADATA) | {"agent": "baton-another"})
