"""``scripts/install_requirements.sh`` shows what it downloads, checks hashes, and fails when pip does."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAME = "tiny-1.0-py3-none-any.whl"


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """URL of an index with one package."""
    folder = tmp_path / "index" / "tiny"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / NAME, "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{NAME}">{NAME}</a>')
    handler = functools.partial(QuietHandler, directory=str(tmp_path / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def run(tmp_path: Path, index: str, digest: str) -> subprocess.CompletedProcess[str]:
    for folder in ("scripts", "requirements"):
        (tmp_path / folder).mkdir()
    script = shutil.copy(ROOT / "scripts/install_requirements.sh", tmp_path / "scripts")
    (tmp_path / "requirements/tiny.txt").write_text(f"tiny==1.0 --hash=sha256:{digest}\n")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    env |= {"PIP_INDEX_URL": index, "PIP_TARGET": str(tmp_path / "target"), "PIP_NO_CACHE_DIR": "1"}
    env |= {"PIP_CONFIG_FILE": os.devnull}
    command = [script, sys.executable, "tiny"]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_downloads_are_shown(tmp_path: Path, index: str) -> None:
    digest = hashlib.sha256((tmp_path / "index/tiny" / NAME).read_bytes()).hexdigest()
    done = run(tmp_path, index, digest)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"  downloading {NAME} (")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert (tmp_path / "target/tiny.py").is_file()


def test_a_wrong_hash_fails_and_is_told(tmp_path: Path, index: str) -> None:
    done = run(tmp_path, index, "0" * 64)
    assert done.returncode == 1
    assert "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "target").exists()
