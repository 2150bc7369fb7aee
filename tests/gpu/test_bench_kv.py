"""``baton bench kv --memory cuda``: every pair of memories is measured on a GPU, and every byte is right."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(900)


def test_every_pair_of_memories() -> None:
    command = [sys.executable, "-m", "baton.cli.main", "bench", "kv", "--memory", "cuda", "--json"]
    command += ["--geometry", "llama-8b", "--isl", "1024", "--pipe", "cuda_ipc,tcp", "--repeat", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    transfers = [line for line in found if line["record"] == "transfer"]
    assert all(line["verified"] for line in transfers)
    assert {(line["memory"], line["pipe"]) for line in transfers} == {
        ("cuda:0 to cuda:0", "cuda_ipc"),
        ("cuda:0 to cuda:0", "tcp"),
        ("cuda:0 to host", "tcp"),
        ("host to cuda:0", "tcp"),
    }
    bare = {line["memory"] for line in found if line["record"] == "baseline" and line["method"] == "memcpy"}
    assert bare == {"cuda:0 to cuda:0", "cuda:0 to host", "host to cuda:0"}
