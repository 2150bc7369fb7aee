"""Kinds of pipe are found by name: built in, or of another package; a kind that cannot work says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.support.transport import file_pipe
from tests.support.transport.transport_rig import Rig

from baton.config.pipes import BUILT_IN, PIPES_HELP, check_pipes, clear_pipes
from baton.config.worker import WorkerConfig
from baton.errors import ConfigError
from baton.kv_transfer.blocks import BlockFetcher
from baton.kv_transfer.pipes.base import PipeKind
from baton.kv_transfer.pipes.registry import load_kind, obstacle, resolve_kinds


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write_entry_point(site: Path, target: str) -> None:
    info = site / "some_pipes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-pipes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[baton.pipes]\npigeon = {target}\n")


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_kind_is_where_the_table_says(name: str) -> None:
    kind = load_kind(name)
    assert issubclass(kind, PipeKind)
    assert kind.name == name


def test_a_kind_of_another_package_is_configured_and_used_like_the_others(site: Path) -> None:
    with pytest.raises(ConfigError, match="pipes must be some of") as caught:
        check_pipes(("file",))
    named = caught.value.message.partition(" of ")[2].partition(", each")[0]
    assert named == PIPES_HELP.partition(": ")[2].replace("or some of ", "")  # as --help has it
    file_pipe.install(site)
    WorkerConfig(pipes=("file", "auto"))
    assert resolve_kinds(("file", "tcp")) == ("file", "tcp")
    assert "file" not in resolve_kinds("auto")
    assert clear_pipes(("shm", "file", "tls")) == ["file"]  # nothing says that it encrypts
    rig = Rig("file")
    assert rig.fetch([1, 2], [3, 4]).pipe_kind == "file"
    assert rig.same([1, 2], [3, 4])
    rig.close()


def test_a_built_in_name_is_not_taken_over(site: Path) -> None:
    info = site / "some_pipes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-pipes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[baton.pipes]\ntcp = tests.support.transport.file_pipe:FileKind\n")
    assert load_kind("tcp").__module__ == "baton.kv_transfer.pipes.tcp"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_package:Pipe", "cannot be imported"),
        ("tests.support.transport.file_pipe:Nothing", "cannot be imported"),
        ("tests.support.transport.file_pipe:install", "is no kind of pipe"),
    ],
)
def test_a_kind_that_cannot_be_loaded_says_why(site: Path, target: str, reason: str) -> None:
    write_entry_point(site, target)
    with pytest.raises(ConfigError, match=reason) as caught:
        resolve_kinds(("pigeon", "tcp"))
    assert caught.value.field == "pipes"
    rig = Rig("tcp")
    with pytest.raises(ConfigError, match=reason):
        BlockFetcher(rig.target, rig.print, kinds=("pigeon",))
    rig.close()


def test_without_torch_the_gloo_pipe_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "baton.kv_transfer.pipes.torch_distributed", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "baton-serve" in obstacle("gloo")
    with pytest.raises(ConfigError, match="baton-serve"):
        resolve_kinds(("gloo",))
