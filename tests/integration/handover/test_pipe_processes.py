"""Processes with NIXL and gloo pipes: they burn nothing when idle, listen where they should, and end cleanly."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
import psutil
import pytest
from tests.support.child_env import child_env
from tests.support.transport.shared_memory import left_behind, segments
from tests.support.transport.transport_faults import LAYOUT, fingerprint
from tests.support.transport.transport_rig import soon

from baton.config.environment import infiniband_ports, interface_of, set_nixl_log_level, set_ucx_environment
from baton.errors import PipeClosedError
from baton.kv_cache.arena import HostArena
from baton.kv_transfer.blocks import BlockFetcher, BlockSource, Endpoint
from baton.types import Epoch, InstanceId

OWNER = """
import json, sys
import numpy as np
from baton.kv_cache.arena import HostArena
from baton.kv_transfer.blocks import BlockServer
from baton.types import InstanceId
from tests.support.transport.transport_faults import LAYOUT, fingerprint
from tests.support.transport.transport_rig import soon

kind = sys.argv[1]
arena = HostArena(64, LAYOUT.block_bytes)
arena.blocks[:] = np.arange(64, dtype=np.uint8)[:, None]
server = BlockServer(arena, fingerprint(LAYOUT), InstanceId("p0"), kinds=(kind,))
endpoint = server.endpoints[0].address
print(json.dumps({"epoch": arena.epoch.hex(), "blocks": endpoint}), flush=True)
sys.stdin.read()
server.close()
"""


def start(kind: str, **env: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_env(**env),
    )
    assert owner.stdout is not None
    return owner, json.loads(owner.stdout.readline())


def source_of(kind: str, said: dict[str, Any]) -> BlockSource:
    endpoint = Endpoint(kind, said["blocks"])
    return BlockSource(InstanceId("p0"), Epoch(bytes.fromhex(said["epoch"])), (endpoint,), fingerprint(LAYOUT), 64)


def use(kind: str, said: dict[str, Any]) -> None:
    """Fetch all blocks."""
    target = HostArena(64, LAYOUT.block_bytes)
    source = source_of(kind, said)
    fetcher = BlockFetcher(target, fingerprint(LAYOUT), kinds=(kind,))
    ids = np.random.default_rng(0).permutation(64)
    result = fetcher.fetch(source, ids, np.zeros(64, np.uint64), np.arange(64), deadline=soon())
    assert result.pipe_kind == kind
    assert result.valid.all()
    assert (target.blocks == ids.astype(np.uint8)[:, None]).all()
    fetcher.close()
    target.close()


def end(owner: subprocess.Popen[str]) -> tuple[int, str]:
    """End a process by closing its standard input; returns its exit code and what it said on standard error."""
    _, errors = owner.communicate(timeout=240)
    return owner.returncode, errors


@pytest.mark.parametrize("kind", ["nixl", "gloo"])
def test_an_idle_owner_burns_nothing_listens_where_asked_and_ends_cleanly(kind: str) -> None:
    memory = segments()
    owner, said = start(kind)
    try:
        use(kind, said)
        process = psutil.Process(owner.pid)
        for last in (*[False] * 5, True):  # what came before may have an end still to come
            before = sum(process.cpu_times()[:2])
            owner.poll()
            time.sleep(1.0)  # what is measured
            if (spent := sum(process.cpu_times()[:2]) - before) < 0.05:
                break
            assert not last, spent
        listening = {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}
        assert end(owner) == (0, "")
    finally:
        owner.kill()
        owner.communicate()
    assert left_behind(memory) == set()


@pytest.mark.parametrize("transports", ["tcp", "tcp,cma,posix"])
def test_nixl_works_over_whatever_ucx_has(transports: str) -> None:
    """Sockets have no one-sided reads: the owner must drive its agent while it is read from, and only then."""
    code = (
        f"import os; os.environ['UCX_TLS'] = {transports!r}\n"
        + "import sys, json\n"
        + ("from tests.integration.handover.test_pipe_processes import use\nuse('nixl', json.loads(sys.argv[1]))\n")
    )
    owner, said = start("nixl", UCX_TLS=transports)
    try:
        command = [sys.executable, "-c", code, json.dumps(said)]
        reader = subprocess.run(command, capture_output=True, text=True, timeout=240, env=child_env())
        assert (reader.returncode, reader.stderr) == (0, "")
        assert end(owner) == (0, "")
    finally:
        owner.kill()
        owner.communicate()


def test_an_owner_killed_in_its_sleep_is_gone_for_its_reader() -> None:

    target = HostArena(64, LAYOUT.block_bytes)
    owner, said = start("nixl")
    source = BlockSource(
        InstanceId("p0"),
        Epoch(bytes.fromhex(said["epoch"])),
        (Endpoint("nixl", said["blocks"]),),
        fingerprint(LAYOUT),
        64,
    )
    fetcher = BlockFetcher(target, fingerprint(LAYOUT), kinds=("nixl",))
    try:
        ids = np.arange(64)
        assert fetcher.fetch(source, ids, np.zeros(64, np.uint64), ids, deadline=soon()).valid.all()
        owner.kill()
        owner.communicate()
        with pytest.raises(PipeClosedError):  # and not the deadline
            fetcher.fetch(source, ids, np.zeros(64, np.uint64), ids, deadline=soon())
    finally:
        fetcher.close()
        owner.kill()
        owner.communicate()
        target.close()


def test_what_ucx_is_told(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"UCX_LOG_LEVEL": "info", "UCX_TLS": "tcp"}
    monkeypatch.setattr("os.environ", env)
    set_nixl_log_level()
    set_ucx_environment("127.0.0.1", infiniband=tmp_path)
    assert env["UCX_NET_DEVICES"] == "lo"
    assert env["UCX_MODULES"] == "^ib"
    assert (env["UCX_LOG_LEVEL"], env["NIXL_LOG_LEVEL"]) == ("info", "FATAL")  # the user's, and ours
    (tmp_path / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    assert infiniband_ports(tmp_path) == ["mlx5_0:1"]
    env.clear()
    set_ucx_environment("localhost", infiniband=tmp_path)
    assert env["UCX_NET_DEVICES"] == "lo,mlx5_0:1"
    assert "UCX_MODULES" not in env
    env.clear()
    set_ucx_environment("0.0.0.0", infiniband=tmp_path)
    assert "UCX_NET_DEVICES" not in env
    assert interface_of("192.0.2.1") is None
