"""The router's image, built from the Dockerfile and run without a daemon: buildah with chroot isolation.

No registry is asked: a Debian with its own Python stands in for the base image, made by mmdebstrap. It takes minutes
and wants root, so ``make image-test`` runs it and ``make test`` does not.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton.rpc.server import free_port
from baton.version import __version__

ROOT = Path(__file__).resolve().parents[2]
READY_S = 120
NEEDS = ("buildah", "mmdebstrap")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("BATON_IMAGE_TEST"), reason="takes minutes: make image-test"),
    pytest.mark.skipif(os.geteuid() != 0, reason="chroot isolation needs root"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDS)), reason=f"needs {' and '.join(NEEDS)}"),
]


class Store:
    """Images of this test alone."""

    def __init__(self, path: Path) -> None:
        self._flags = ("--root", str(path / "images"), "--runroot", str(path / "run"), "--storage-driver", "vfs")

    def command(self, *args: str) -> list[str]:
        return ["buildah", *self._flags, *args]

    def __call__(self, *args: str) -> str:
        done = subprocess.run(self.command(*args), capture_output=True, text=True, check=False, timeout=3000)
        assert done.returncode == 0, f"{args}: {done.stdout[-2000:]} {done.stderr[-4000:]}"
        return done.stdout.strip()


def make_base(store: Store, path: Path) -> str:
    """Return the name, with its digest, of a Debian that has ``python`` and ``pip``."""
    archive = path / "base.tar"
    link = 'ln -s python3 "$1/usr/bin/python" && rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED'
    packages = "--include=python3,python3-venv,python3-pip,ca-certificates"
    slim = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
    command = ["mmdebstrap", "--variant=minbase", packages, *slim, f"--customize-hook={link}", "bookworm", str(archive)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000)
    if done.returncode:
        pytest.skip(f"no Debian can be had here: {done.stderr[-500:]}")
    container = store("from", "scratch")
    store("add", container, str(archive), "/")
    store("config", "--env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
    store("commit", "--rm", container, "localhost/baton-python:bookworm")
    archive.unlink()
    digest = store("images", "--format", "{{.Digest}}", "localhost/baton-python:bookworm")
    return f"localhost/baton-python@{digest}"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    path = tmp_path_factory.mktemp("images")
    yield Store(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def container(store: Store, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A container of the router's image."""
    base = make_base(store, tmp_path_factory.mktemp("base"))
    wrapper = tmp_path_factory.mktemp("bin") / "buildah"  # the same images for scripts/build_images.sh
    buildah, *flags = store.command()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which(buildah)} {" ".join(flags)} "$@"\n')
    wrapper.chmod(0o755)
    env = os.environ | {
        "PATH": f"{wrapper.parent}:{os.environ['PATH']}",
        "BUILDER": "buildah",
        # With the authorities of this host, whose network may have its own.
        "BUILD_ARGS": "--isolation chroot --volume /etc/ssl/certs:/etc/ssl/certs:ro",
    }
    command = ["scripts/build_images.sh", base, "test", "router"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return store("from", "localhost/baton-router:test")


def in_container(store: Store, container: str, *command: str) -> str:
    return store("run", "--isolation", "chroot", container, "--", *command)


def test_the_image_is_what_it_should_be(store: Store, container: str) -> None:
    inspected = json.loads(store("inspect", container))
    labels = inspected["OCIv1"]["config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == __version__
    assert "@sha256:" in labels["org.opencontainers.image.base.name"]
    assert inspected["OCIv1"]["config"]["User"] == "10001:10001"
    assert "uid=10001" in in_container(store, container, "id")
    assert in_container(store, container, "baton-router", "--version") == __version__
    for missing in ("cc", "gcc", "c++", "g++", "clang", "zig", "pip"):
        found = in_container(store, container, "sh", "-c", f"PATH=/opt/baton/bin command -v {missing} || true")
        assert found == "", missing
        if missing != "pip":  # the base image's own
            assert in_container(store, container, "sh", "-c", f"command -v {missing} || true") == ""
    code = "import importlib.util as i; print([n for n in ('torch', 'transformers', 'pip') if i.find_spec(n)])"
    assert in_container(store, container, "python", "-c", code) == "[]"
    listed = json.loads(in_container(store, container, "cat", "/opt/baton/baton.cdx.json"))
    names = {each["name"] for each in listed["components"]}
    assert listed["bomFormat"] == "CycloneDX"
    assert {"grpcio", "xxHash"} <= names
    assert not {"torch", "pip", "uv"} & names
    sizes: dict[str, str] = {}
    mount = Path(store("mount", container))
    for name, path in (("Baton and its packages", mount / "opt/baton"), ("with the base image", mount)):
        size = subprocess.run(["du", "-smx", "--apparent-size", str(path)], capture_output=True, text=True, check=True)
        sizes[name] = size.stdout.split()[0]
    print(f"\nrouter image: {', '.join(f'{name} {size} MB' for name, size in sizes.items())}")  # noqa: T201
    assert int(sizes["Baton and its packages"]) < 300


def test_the_router_of_the_image_serves(store: Store, container: str, tmp_path: Path) -> None:
    port, http, grpc = free_port(), free_port(), free_port()
    decode = subprocess.Popen(
        [sys.executable, "-m", "baton_decode.main", "--port", str(port), "--dtype", "float32"], cwd=ROOT
    )
    flags = ("--port", str(http), "--grpc-port", str(grpc), "--decode", f"127.0.0.1:{port}")
    env = ("--env", "BATON_MODEL=/opt/baton/models/baton-tiny")
    router = subprocess.Popen(
        store.command("run", "--isolation", "chroot", *env, container, "--", "baton-router", *flags),
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + READY_S
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{http}/readyz", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline
            assert router.poll() is None
            assert decode.poll() is None
            time.sleep(0.1)
        body = {"model": "baton-tiny", "prompt": "def main():", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{http}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
    finally:
        os.killpg(router.pid, signal.SIGTERM)
        decode.terminate()
        router.wait(60)
        decode.wait(60)
