"""``scripts/install_promtool.sh`` takes promtool alone out of Debian's package, and is no error where it cannot."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/install_promtool.sh"
PROMTOOL = "#!/bin/sh\necho promtool of the package\n"

pytestmark = pytest.mark.skipif(
    any(shutil.which(name) is None for name in ("apt-get", "dpkg", "dpkg-deb")), reason="not a Debian"
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Folder that is a repository of packages with one, which would start a server."""
    contents, folder = tmp_path / "contents", tmp_path / "repository"
    for path, text in {
        "DEBIAN/postinst": f"#!/bin/sh\ntouch {tmp_path}/started\n",
        "usr/bin/prometheus": "#!/bin/sh\n",
        "usr/bin/promtool": PROMTOOL,
    }.items():
        (contents / path).parent.mkdir(parents=True, exist_ok=True)
        (contents / path).write_text(text)
        (contents / path).chmod(0o755)
    (contents / "DEBIAN").chmod(0o755)
    arch = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()
    about = f"Package: prometheus\nVersion: 1.0\nArchitecture: {arch}\nMaintainer: Nobody <a@b.c>\nDescription: tiny\n"
    (contents / "DEBIAN/control").write_text(about)
    folder.mkdir()
    package = folder / "prometheus.deb"
    command = ["dpkg-deb", "--build", "--root-owner-group", str(contents), str(package)]
    subprocess.run(command, check=True, capture_output=True)
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    listed = f"{about}Filename: ./prometheus.deb\nSize: {package.stat().st_size}\nSHA256: {digest}\n\n"
    (folder / "Packages").write_text(listed)
    return folder


def install(tmp_path: Path, repository: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run the script with packages of that repository and an apt that knows of none yet."""
    target = tmp_path / "bin"
    for folder in (target, tmp_path / "state/lists/partial", tmp_path / "cache/archives/partial"):
        folder.mkdir(parents=True)
    (tmp_path / "sources.list").write_text(f"deb [trusted=yes] file:{repository} ./\n")
    (tmp_path / "status").touch()
    config = {
        "Dir::State": tmp_path / "state",
        "Dir::State::status": tmp_path / "status",
        "Dir::Cache": tmp_path / "cache",
        "Dir::Etc::sourcelist": tmp_path / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "APT::Sandbox::User": "",
    }
    (tmp_path / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in config.items()))
    env = os.environ | {"APT_CONFIG": str(tmp_path / "apt.conf"), "PATH": without_promtool(tmp_path)}
    done = subprocess.run([SCRIPT, target], capture_output=True, text=True, env=env, check=False)
    return target, done


def without_promtool(tmp_path: Path) -> str:
    """Return a PATH to all programs but a promtool."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for each in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(each).iterdir() if Path(each).is_dir() else ():
            if program.name != "promtool":
                (folder / program.name).unlink(missing_ok=True)
                (folder / program.name).symlink_to(program)
    return str(folder)


def test_promtool_alone_is_there_afterwards(tmp_path: Path, repository: Path) -> None:
    target, done = install(tmp_path, repository)
    assert done.returncode == 0
    assert [each.name for each in target.iterdir()] == ["promtool"], done.stderr
    found = subprocess.run([target / "promtool"], capture_output=True, text=True, check=True)
    assert found.stdout == "promtool of the package\n"
    assert not (tmp_path / "started").exists()


def test_a_package_that_is_not_what_the_list_says_is_not_used(tmp_path: Path, repository: Path) -> None:
    package = repository / "prometheus.deb"
    package.write_bytes(package.read_bytes()[:-1] + b"?")
    target, done = install(tmp_path, repository)
    assert done.returncode == 0
    assert not list(target.iterdir())
    assert f"that did not work: the tests of alerts are skipped without promtool; put it into {target}" in done.stderr


def test_nobody_to_ask_is_said(tmp_path: Path) -> None:
    target, done = install(tmp_path, tmp_path / "not there")
    assert done.returncode == 0
    assert not list(target.iterdir())
    assert "Unable to locate package prometheus" in done.stderr
    assert "that did not work: the tests of alerts are skipped" in done.stderr


def test_one_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    there = tmp_path / "bin/promtool"
    there.write_text("#!/bin/sh\n")
    there.chmod(0o755)
    env = os.environ | {"PATH": without_promtool(tmp_path)}
    done = subprocess.run([SCRIPT, there.parent], capture_output=True, text=True, env=env, check=True)
    assert done.stderr == ""
    assert there.read_text() == "#!/bin/sh\n"
