"""``baton up`` looks at model, device and ranks before it starts anything: a mistake is one line and status 2."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.cli.main import main
from baton.cli.plan import plan_from
from baton.cli.up import add_parser
from baton.config.demo_model import default_model
from baton.errors import ConfigError


def plan(*flags: str) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    plan_from(parser.parse_args(["up", "--port", "0", "--grpc-port", "0", *flags]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder whose files may be changed."""
    copied = tmp_path / "model"
    shutil.copytree(default_model(), copied)
    return copied


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_whole_model_passes(folder: Path) -> None:
    plan("--model", str(folder), "--tp", "2", "--pp", "2")


@pytest.mark.parametrize(
    ("flags", "told", "field"),
    [
        (["--tp", "64"], "4 query heads cannot be divided over tp=64", "tp"),
        (["--decode-tp", "3"], "decode instances: 4 query heads cannot be divided over tp=3", "decode_tp"),
        (["--prefill-args", "--tp 3"], "--prefill-args: 4 query heads cannot be divided over tp=3", "prefill_args"),
        (["--pp", "50"], "layers cannot be divided into pp=50 stages", "pp"),
        (["--device", "gpu"], "device 'gpu': only cpu, cuda and interpret are supported", "device"),
        (["--device", "cuda:x"], "device 'cuda:x': only cpu, cuda and interpret are supported", "device"),
        (["--speculative", "foo"], "speculative 'foo' is not known", "speculative"),
        (["--decode-args", "--speculative foo"], "--decode-args: speculative 'foo' is not known", "decode_args"),
        (["--decode-args", "--kv-blokcs 9"], "--decode-args: there is no flag --kv-blokcs; did", "decode_args"),
        (["--router-args", "--beta x"], "--router-args: --beta must be a number, got 'x'", "router_args"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(flags: list[str], told: str, field: str, folder: Path) -> None:
    change_config(folder, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ConfigError) as error:
        plan("--model", str(folder), *flags)
    assert told in error.value.message
    assert error.value.field == field


def test_kv_heads_count_too(folder: Path) -> None:
    change_config(folder, num_attention_heads=12, num_key_value_heads=4)
    with pytest.raises(ConfigError, match="4 KV heads cannot be divided over tp=3"):
        plan("--model", str(folder), "--tp", "3")


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_a_torch_without_cuda_serves_no_gpu(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cli.model_check.torch_has_gpus", lambda: build == "cuda")
    if build == "cuda":
        plan("--device", "cuda:0")
        return
    with pytest.raises(ConfigError, match="device 'cuda:0': the installed torch is built for CPUs") as error:
        plan("--device", "cuda:0")
    assert error.value.field == "device"


def test_the_configuration_of_another_machine_can_be_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("baton.cli.model_check.torch_has_gpus", lambda: False)
    assert main(["config", "show", "--device", "cuda:0", "--tp", "64"]) == 0
    assert "cuda:0" in capsys.readouterr().out


def weights(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def remove(path: Path) -> None:
    path.unlink()


def make_unreadable(path: Path) -> None:
    """Replace the file by what also root cannot read: a folder."""
    path.unlink()
    path.mkdir()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("config.json", remove, "has no config.json"),
        ("config.json", truncate, "config.json cannot be read"),
        ("tokenizer.json", truncate, "tokenizer.json cannot be read"),
        ("model.safetensors", remove, "has no safetensors weights"),
        ("model.safetensors", make_unreadable, "model.safetensors cannot be read: Is a directory"),
        ("model.safetensors", truncate, "model.safetensors: truncated or corrupt"),
    ],
)
def test_files_that_cannot_be_read_are_named(name: str, damage: Any, told: str, folder: Path) -> None:
    damage(folder / name if name != "model.safetensors" else weights(folder))
    with pytest.raises(ConfigError) as error:
        plan("--model", str(folder))
    assert told in error.value.message
    assert error.value.field == "model"


def test_neither_torch_nor_a_process_is_started_for_it() -> None:
    program = """
import subprocess, sys
from baton.cli.main import main
def started(*words, **options):
    raise AssertionError(words)
subprocess.Popen = started
code = main(["up", "--tp", "64"])
assert "torch" not in sys.modules
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "cannot be divided over tp=64" in done.stderr
    assert done.stderr.count("\n") == 1
