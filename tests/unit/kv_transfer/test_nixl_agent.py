"""The NIXL agent: reads end before their caller goes on, strange metadata is refused, a no has a reason."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.support.child_env import child_env
from tests.support.transport_rig import Media, lets_go, nixl_agents, open_fds, soon

from baton.errors import ConfigError, DeadlineError, PipeClosedError
from baton.kv_transfer.blocks.pipe_kinds import kind_obstacle, resolve_kinds
from baton.kv_transfer.pipes import nixl_agent
from baton.kv_transfer.pipes.nixl_agent import NixlAgent, Region, Rows, attend
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.protocol.frames import BadFrameError
from baton.kv_transfer.protocol.sockets import Stream


def streams() -> tuple[Stream, Stream]:
    a, b = socket.socketpair()
    return Stream(a, peer="a"), Stream(b, peer="b")


def rows(to: Region, source: Region, size: int) -> tuple[Rows, Rows]:
    return np.array([[to.address, size, 0]], np.uint64), np.array([[source.address, size, 0]], np.uint64)


def test_one_agent_reads_anothers_memory_while_that_attends() -> None:
    owner, reader = nixl_agents()
    source, target = owner.lend(1 << 20), reader.lend(1 << 20)
    source.memory[:] = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    mine, theirs = streams()
    reader.connect(owner.name, source.metadata)
    attending = threading.Thread(target=attend, args=(owner, theirs, Wait(soon()), "attending"))
    attending.start()
    reader.read(owner.name, rows(target, source, 1 << 20), target, mine, Wait(soon()))
    assert np.array_equal(target.memory, source.memory)
    mine.send_all([b"."], Wait(soon()), "saying so")
    attending.join(60)
    assert not attending.is_alive()
    elsewhere = np.array([[4096, 100, 0]], np.uint64)
    with pytest.raises(PipeClosedError, match="cannot be read"):
        reader.read(owner.name, (rows(target, source, 100)[0], elsewhere), target, mine, Wait(soon()))
    reader.disconnect(owner.name)  # and forgotten, since a read failed
    with pytest.raises(PipeClosedError, match="cannot be read"):
        reader.read(owner.name, rows(target, source, 100), target, mine, Wait(soon()))
    owner.give_back(source)
    reader.give_back(target)
    assert reader.lend(1 << 20) is target  # registered once
    mine.close()
    theirs.close()


def test_metadata_that_is_not_the_peers_is_refused() -> None:
    owner, reader = NixlAgent(), NixlAgent()  # none that others use: NIXL keeps half of what was cut, for good
    source = owner.lend(4096)
    for name, metadata in (
        (owner.name, b""),
        (owner.name, b"garbage" * 20),
        (owner.name, source.metadata[:-20]),
        ("somebody", source.metadata),
        (reader.name, source.metadata),
    ):
        with pytest.raises(BadFrameError):
            reader.connect(name, metadata)
    owner.give_back(source)
    owner.close()
    reader.close()


def test_a_closed_agent_says_so() -> None:
    agent = NixlAgent()
    agent.close()
    agent.close()
    assert agent.closed
    for call in (agent.progress, lambda: agent.lend(4096), lambda: agent.connect("x", b"y")):
        with pytest.raises(PipeClosedError):
            call()


def meet_often() -> None:
    """Pipes that come and go, over sockets; run with ``UCX_TLS=tcp``."""
    media, open_before = Media("nixl"), 0
    for turn in range(12):
        for end in media.pair():
            end.close()
        if turn == 3:
            open_before = open_fds()
    assert lets_go(open_before + 2), "one or more with every pair"  # UCX's threads may open one of their own late


def read_that_never_ends() -> None:
    """Over sockets a read needs its owner's progress, which never comes here; run with ``UCX_TLS=tcp``."""
    owner, reader = NixlAgent(), NixlAgent()
    source, target = owner.lend(1 << 20), reader.lend(1 << 20)
    source.memory[:] = 7
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
    reader.give_back(target)
    assert reader.lend(1 << 20) is not target  # never lent again: the read may yet come
    reader.close()
    end = soon(0.3)
    while time.monotonic() < end:
        owner.progress()
    assert not target.memory.any()
    owner.close()


@pytest.mark.parametrize("what", ["read_that_never_ends", "meet_often"])
def test_over_sockets(what: str) -> None:
    code = f"from tests.unit.kv_transfer.test_nixl_agent import {what}; {what}()"
    env = child_env(UCX_TLS="tcp")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_nixl_the_pipe_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_MODULES", ("no_such_nixl",))
    assert "pip install nixl-cu12" in kind_obstacle("nixl")
    with pytest.raises(ConfigError, match="nixl-cu12") as caught:
        resolve_kinds(("nixl", "tcp"))
    assert caught.value.field == "pipes"
    with pytest.raises(ConfigError, match="nixl-cu12"):
        NixlAgent()


def test_auto_takes_nixl_where_there_is_infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_kinds("auto", infiniband=tmp_path) == ("shm", "tcp")
    (tmp_path / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    assert resolve_kinds("auto", infiniband=tmp_path) == ("shm", "nixl", "tcp")
    assert resolve_kinds(("tcp", "auto"), memory=True, infiniband=tmp_path) == ("tcp", "memory", "shm", "nixl")
    monkeypatch.setattr(nixl_agent, "_MODULES", ("no_such_nixl",))
    assert resolve_kinds(("auto",), infiniband=tmp_path) == ("shm", "tcp")


@pytest.mark.parametrize("kinds", [(), ("pigeon",), ("tcp", "tcp"), "", ("auto", "auto")])
def test_kinds_that_make_no_sense_are_refused(kinds: object) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_kinds(kinds)  # type: ignore[arg-type]
    assert caught.value.field == "pipes"
