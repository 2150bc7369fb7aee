"""Pipes between two hosts: network namespaces joined by a veth pair, where 127.0.0.1 leads nowhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.support.child_env import child_env

OWNER = """
import json, sys
import numpy as np
import psutil
from baton.kv_cache.arena import HostArena
from baton.kv_transfer.blocks import BlockServer
from baton.rpc.service_token import Token
from baton.types import InstanceId
from tests.support.transport.transport_faults import LAYOUT, fingerprint

arena = HostArena(64, LAYOUT.block_bytes)
arena.blocks[:] = np.arange(64, dtype=np.uint8)[:, None]
kinds = sys.argv[2:]
token = Token("secret")
server = BlockServer(arena, fingerprint(LAYOUT), InstanceId("p0"), kinds=kinds, host=sys.argv[1], token=token)
endpoints = [[e.kind, e.address] for e in server.endpoints]
print(json.dumps({"epoch": arena.epoch.hex(), "endpoints": endpoints}), flush=True)
sys.stdin.read()
found = psutil.Process().net_connections("inet")
print(json.dumps(sorted({c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN})), flush=True)
server.close()
"""

READER = """
import json, sys
import numpy as np
from baton.kv_cache.arena import HostArena
from baton.kv_transfer.blocks import BlockFetcher, BlockSource, Endpoint, LinkOptions
from baton.rpc.service_token import Token
from baton.types import Epoch, InstanceId
from tests.support.transport.transport_faults import LAYOUT, fingerprint
from tests.support.transport.transport_rig import soon

said = json.loads(sys.argv[1])
endpoints = tuple(Endpoint(*each) for each in said["endpoints"])
source = BlockSource(InstanceId("p0"), Epoch(bytes.fromhex(said["epoch"])), endpoints, fingerprint(LAYOUT), 64)
target = HostArena(64, LAYOUT.block_bytes)
for kind, _ in said["endpoints"]:
    fetcher = BlockFetcher(target, fingerprint(LAYOUT), kinds=(kind,), links=LinkOptions(token=Token("secret")))
    ids = np.random.default_rng(len(kind)).permutation(64)
    result = fetcher.fetch(source, ids, np.zeros(64, np.uint64), np.arange(64), deadline=soon())
    assert (result.pipe_kind, bool(result.valid.all())) == (kind, True)
    assert (target.blocks == ids.astype(np.uint8)[:, None]).all()
    fetcher.close()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=240)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces; 10.77.0.1 is in the first, 10.77.0.2 in the second."""
    if shutil.which("ip") is None:
        pytest.skip("needs the ip command")
    tag = f"{os.getpid() % 100_000}"
    names = f"bta{tag}", f"btb{tag}"
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"may not make network namespaces: {error.stderr.decode(errors='replace').strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", f"va{tag}", "netns", names[0], "type", "veth", "peer", "name", f"vb{tag}", "netns", names[1])
        for at, (name, end) in enumerate(zip(names, (f"va{tag}", f"vb{tag}"), strict=True), start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{at}/24", "dev", end)
            for device in (end, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=240, check=False)


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_blocks_come_from_another_host_and_nothing_listens_elsewhere(hosts: tuple[str, str], transports: str) -> None:
    env = child_env(UCX_TLS=transports)
    kinds = ["nixl"] if transports == "tcp" else ["nixl", "tcp", "gloo"]
    owner = subprocess.Popen(
        ["ip", "netns", "exec", hosts[0], sys.executable, "-c", OWNER, "10.77.0.1", *kinds],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        assert owner.stdout is not None
        said = owner.stdout.readline()
        command = ["ip", "netns", "exec", hosts[1], sys.executable, "-c", READER, said]
        reader = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
        assert (reader.returncode, reader.stderr) == (0, "")
        listening, errors = owner.communicate(timeout=240)
        assert (owner.returncode, errors, json.loads(listening)) == (0, "", ["10.77.0.1"])
    finally:
        owner.kill()
        owner.communicate()
