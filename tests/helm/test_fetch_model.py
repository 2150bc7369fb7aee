"""The script that brings a model into a pod's volume."""

from __future__ import annotations

import functools
import hashlib
import http.server
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.chart import CHART


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """URL and SHA-256 of an archive with a model in a folder of its own."""
    model = tmp_path / "acme"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text(name)
    (tmp_path / "www").mkdir()
    archive = tmp_path / "www/acme.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(model, arcname="models/acme")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "www"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/acme.tar.gz", hashlib.sha256(archive.read_bytes()).hexdigest()
        server.shutdown()
        thread.join()


def fetch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHART / "files/fetch_model.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_a_model_is_fetched_once_whole_or_without_weights(served: tuple[str, str], tmp_path: Path) -> None:
    url, sha256 = served
    volume = tmp_path / "volume"
    volume.mkdir()
    assert fetch(url, str(volume / "acme"), f"--sha256={sha256}").returncode == 0
    assert {path.name for path in (volume / "acme").iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert fetch(url, str(volume / "light"), f"--sha256={sha256}", "--no-weights").returncode == 0
    assert {path.name for path in (volume / "light").iterdir()} == {"config.json", "tokenizer.json"}
    assert fetch("http://127.0.0.1:1/gone.tar", str(volume / "acme")).returncode == 0  # it is there
    assert {path.name for path in volume.iterdir()} == {"acme", "light"}


def test_another_archive_than_named_is_refused_and_leaves_nothing(served: tuple[str, str], tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    done = fetch(served[0], str(volume / "acme"), f"--sha256={'0' * 64}")
    assert done.returncode != 0
    assert served[1] in done.stderr
    assert list(volume.iterdir()) == []


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        tar.add(tmp_path / "config.json", arcname="../../outside.json")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        done = fetch(f"http://127.0.0.1:{server.server_port}/bad.tar", str(tmp_path / "volume"))
        server.shutdown()
        thread.join()
    assert "leads out of the folder" in done.stderr
    assert not list(tmp_path.rglob("outside.json"))
