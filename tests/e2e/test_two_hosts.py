"""Two hosts, as far as one machine can be two: network namespaces joined by a veth pair, with delay and loss."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

BENCH = [sys.executable, "-m", "baton.cli.main", "bench", "kv"]
SOURCES, TARGETS = "10.211.77.1", "10.211.77.2"
PORT = 7100
LIMIT_S = 240


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@dataclass(frozen=True)
class Hosts:
    """Names of the two namespaces, the source's and the target's, and of the link's ends in them."""

    sources: str
    targets: str

    def inside(self, name: str, *command: str) -> list[str]:
        return ["ip", "netns", "exec", name, *command]

    def impair(self, *settings: str) -> None:
        """Have the kernel delay and drop packets in both directions; skip where it cannot."""
        for name in (self.sources, self.targets):
            command = ["tc", "qdisc", "replace", "dev", f"v{name}", "root", "netem", *settings]
            done = run(*self.inside(name, *command))
            if done.returncode:
                pytest.skip(f"tc netem does not work here: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} (iproute2)")
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    tag = secrets.token_hex(3)
    pair = Hosts(f"bs{tag}", f"bt{tag}")
    made: list[str] = []
    try:
        for name in (pair.sources, pair.targets):
            done = run("ip", "netns", "add", name)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
            made.append(name)
        ends = f"v{pair.sources}", f"v{pair.targets}"
        done = run("ip", "-n", pair.sources, "link", "add", ends[0], "type", "veth", "peer", "name", ends[1],
                   "netns", pair.targets)  # fmt: skip
        if done.returncode:
            pytest.skip(f"no veth pairs here: {done.stderr.strip()}")
        for name, end, address in ((pair.sources, ends[0], SOURCES), (pair.targets, ends[1], TARGETS)):
            for command in (
                ("addr", "add", f"{address}/24", "dev", end),
                ("link", "set", end, "up"),
                ("link", "set", "lo", "up"),
            ):
                assert run("ip", "-n", name, *command).returncode == 0
        yield pair
    finally:
        for name in made:
            assert run("ip", "netns", "del", name).returncode == 0


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(secrets.token_hex(16), encoding="utf-8")
    return str(path)


@pytest.fixture
def listening(hosts: Hosts, token: str) -> Iterator[Hosts]:
    """The two hosts, with ``--listen`` running on the one."""
    command = hosts.inside(hosts.sources, *BENCH, "--listen", f"{SOURCES}:{PORT}", "--token-file", token)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == f"listening on {SOURCES}:{PORT}; Ctrl-C ends\n"
        yield hosts
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130


def measured(hosts: Hosts, token: str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    command = [*BENCH, "--connect", f"{SOURCES}:{PORT}", "--token-file", token, "--json", *arguments]
    done = run(*hosts.inside(hosts.targets, *command))
    assert done.stderr == ""
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def transfers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["record"] == "transfer"]


QUICK = ["--geometry", "baton-tiny", "--repeat", "2", "--warmup", "1", "--no-reference"]


def test_two_hosts(listening, token):
    code, lines = measured(listening, token, *QUICK, "--isl", "256,2048", "--pipe", "tcp", "--streams", "1,3")
    assert code == 0, lines
    assert len(transfers(lines)) == 4
    assert all(line["verified"] and line["bytes"] == 1536 * line["tokens"] for line in transfers(lines))


def test_what_does_not_reach_the_other_host_says_so(listening, token):
    code, lines = measured(listening, token, *QUICK, "--isl", "256", "--pipe", "shm,tcp", "--streams", "1")
    assert code == 2
    (missing,) = [line for line in lines if line["record"] == "unavailable"]
    assert (missing["method"], missing["asked"]) == ("shm", True)
    assert "cannot connect" in missing["reason"]
    assert [(line["pipe"], line["verified"]) for line in transfers(lines)] == [("tcp", True)]


def test_every_pipe_that_crosses_hosts(listening, token):
    code, lines = measured(listening, token, *QUICK, "--isl", "1024", "--streams", "1")
    assert code == 0, lines
    reasons = {line["method"]: line["reason"] for line in lines if line["record"] == "unavailable"}
    found = {line["pipe"]: line for line in transfers(lines)}
    assert {*found, *reasons} == {"shm", "tcp", "nixl", "gloo"}
    assert "tcp" in found
    assert all(line["verified"] and line["limit"] == "socket" for line in found.values())
    assert all("pip install" in reason for pipe, reason in reasons.items() if pipe != "shm")


def test_delay_and_loss(listening, token):
    listening.impair("delay", "2ms", "1ms", "loss", "0.5%", "corrupt", "0.1%")
    arguments = ["--isl", "1024", "--pipe", "tcp", "--streams", "2", "--src-tp", "2", "--dst-block-size", "32"]
    code, lines = measured(listening, token, *QUICK, *arguments)
    assert code == 0, lines
    (line,) = transfers(lines)
    assert line["verified"]
    assert line["p50_ms"] >= 2 * 1.0  # there and back, each at least a millisecond
