"""Third-party clients in environments of their own: each as its package installs, none among Baton's dependencies."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HOME = Path(os.environ.get("BATON_CLIENTS_HOME", Path.home() / ".cache" / "baton-clients"))
INSTALL_S = 1800
PROGRAMS = Path(__file__).with_name("programs")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Program:
    """A client that was installed.

    Attributes:
        folder: Its environment: a virtual one, or that of npm.
    """

    folder: Path

    def run(self, *command: str, timeout: float = 600.0, cwd: Path | None = None, **environment: str) -> str:
        """Run one of its commands and return its standard output; an error fails the test with what it wrote."""
        binaries = (self.folder / part / command[0] for part in ("bin", "node_modules/.bin"))
        words = [next((str(binary) for binary in binaries if binary.exists()), command[0]), *command[1:]]
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False,
            cwd=cwd or self.folder, env={**os.environ, "PWD": str(cwd or self.folder), **offline, **environment},
        )  # fmt: skip
        if done.returncode:
            pytest.fail(f"{' '.join(words)}: status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
        return done.stdout

    def script(self, name: str, *arguments: str) -> Any:
        """Run a script of ``programs`` by node, and return the JSON in its last line."""
        path = self.folder / name  # beside its modules, where node looks for them
        path.write_bytes((PROGRAMS / name).read_bytes())
        return json.loads(self.run("node", str(path), *arguments).splitlines()[-1])


def python(
    name: str, *requirements: str, bare: tuple[str, ...] = (), least: tuple[int, int] = sys.version_info[:2]
) -> Program:
    """Return an environment with Python packages; skips the test where they do not install.

    Args:
        name: Of the environment.
        requirements: For pip; torch, where one of them wants it, is the version of ``constraints.txt``.
        bare: Packages to install without what they depend on.
        least: The version of Python that they need; another interpreter than this one is looked for.
    """
    torch = next(line for line in (_ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    constraints = HOME / "constraints.txt"
    folder = _folder(name, *requirements, *bare)
    if not (folder / "installed").exists():
        HOME.mkdir(parents=True, exist_ok=True)
        constraints.write_text(torch.split()[0].rstrip("\\") + "\n")
        _install(name, _interpreter(least), "-m", "venv", "--clear", str(folder))
        pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "-c", str(constraints))
        _install(name, *pip, *requirements)
        if bare:
            _install(name, *pip, "--no-deps", *bare)
        (folder / "installed").touch()
    return Program(folder)


def _interpreter(least: tuple[int, int]) -> str:
    """Return a Python of at least a version; skips the test where there is none."""
    if sys.version_info[:2] >= least:
        return sys.executable
    for minor in range(least[1], least[1] + 4):
        name = f"python{least[0]}.{minor}"
        own = sorted(Path.home().glob(f".pyenv/versions/{least[0]}.{minor}.*/bin/{name}"))
        for found in (*map(str, own), shutil.which(name)):
            # A name on the path may stand for a version that is not there.
            if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
                return found
    pytest.skip(f"there is no Python {least[0]}.{least[1]} or newer here")


def sdist(name: str, version: str) -> Path:
    """Return the unpacked source distribution of a Python package; skips the test where it cannot be downloaded."""
    folder = HOME / f"{name}-{version}"
    if not folder.exists():
        scratch = HOME / f"{name}-{version}.part"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        pip = (sys.executable, "-m", "pip", "download", "-q", "--no-binary", ":all:", "--no-deps", "-d", str(scratch))
        # pip reads the metadata by the package's own build, which need not work here: what it unpacked is kept.
        command = (*pip, "--no-build-isolation", "--no-clean", f"{name}=={version}")
        environment = {**os.environ, "TMPDIR": str(scratch)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False, env=environment)
        found = sorted(scratch.glob(f"*/{name}*/PKG-INFO"))
        if not found:
            pytest.skip(f"{name} {version} does not download here: {(done.stderr.splitlines() or ['?'])[-1]}")
        found[0].parent.rename(folder)
        shutil.rmtree(scratch)
    return folder


def npm(name: str, *packages: str) -> Program:
    """Return a folder with packages of npm; skips the test where they do not install."""
    folder = _folder(name, *packages)
    if not (folder / "installed").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _install(name, "npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *packages)
        (folder / "installed").touch()
    return Program(folder)


def _folder(name: str, *requirements: str) -> Path:
    digest = hashlib.sha256("\n".join((sys.version, *requirements)).encode()).hexdigest()[:8]
    return HOME / f"{name}-{digest}"


def _install(name: str, *command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{name} does not install here: {error}")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "WARNING" not in line] or ["?"]
        pytest.skip(f"{name} does not install here: {lines[-1]}")
