"""Ports that are given away before anybody listens there: each to one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baton.rpc import server as ports
from baton.rpc.server import free_ports

CODE = "from baton.rpc.server import free_ports; print(*free_ports(600))"


def test_processes_that_ask_at_the_same_time_get_different_ports() -> None:
    asking = [subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    given = [port for process in asking for port in process.communicate()[0].split()]
    assert [process.returncode for process in asking] == [0, 0, 0]
    assert len(given) == len(set(given)) == 1800


def test_a_port_that_was_given_away_is_given_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(ports.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(ports.time, "time", lambda: now)
    with ports.promised_ports() as promised:
        promised[12345] = now
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text(file.read_text() + "what others wrote\n7 x\n\n")
    now += ports.PROMISED_S - 1
    with ports.promised_ports() as promised:
        assert promised == {12345: 1000.0}
    now += 2
    with ports.promised_ports() as promised:
        assert promised == {}


@pytest.mark.parametrize("why", ["a link", "no folder"])
def test_where_no_file_can_be_used_ports_are_given_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    folder = tmp_path if why == "a link" else tmp_path / "nowhere"
    monkeypatch.setattr(ports.tempfile, "gettempdir", lambda: str(folder))
    monkeypatch.setattr(ports.os, "getuid", lambda: 1)
    if why == "a link":
        (tmp_path / "mine").write_text("mine")
        (tmp_path / "baton-ports-1").symlink_to(tmp_path / "mine")
    assert len(set(free_ports(3))) == 3
    if why == "a link":
        assert (tmp_path / "mine").read_text() == "mine"
