"""What is installed: every file by its hash, in the versions tested together; images by their digests."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "requirements").glob("*.txt"))
INSTALLED = ("base", "engine", "torch", "dev")
"""What ``make install`` asks for; ``cuda`` comes with torch's build for CUDA."""
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
_BY_DIGEST = re.compile(r"\S+@sha256:[0-9a-f]{64}")


def entries(path: Path) -> list[tuple[Requirement, list[str]]]:
    """The requirements of a file and their hashes; everything in it must be one or the other, or a comment."""
    found: list[tuple[Requirement, list[str]]] = []
    for line in path.read_text().splitlines():
        text = line.rstrip(" \\")
        if text.startswith("    "):
            assert _HASH.fullmatch(text.strip()), f"{path.name}: {line}"
            found[-1][1].append(text.strip())
        elif not text.startswith("#"):
            found.append((Requirement(text), []))
    return found


def pins(*names: str) -> dict[str, str]:
    return {
        canonicalize_name(each.name): str(each.specifier)
        for name in names
        for each, _ in entries(ROOT / f"requirements/{name}.txt")
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_requirements_are_pinned_and_every_file_has_its_hash(path: Path) -> None:
    for requirement, hashes in entries(path):
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), requirement
        assert requirement.url is None
        assert hashes, requirement


def test_versions_are_those_tested_together() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    tested = {canonicalize_name(each.name): str(each.specifier) for each in map(Requirement, lines)}
    installed = pins(*INSTALLED)
    assert {name: installed[name] for name in installed if name in tested} == {
        name: tested[name] for name in installed if name in tested
    }
    everywhere = {
        canonicalize_name(each.name)
        for name in INSTALLED
        for each, _ in entries(ROOT / f"requirements/{name}.txt")
        if each.marker is None
    }
    assert everywhere <= set(tested)


def test_everything_that_this_environment_needs_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(each for name in ("engine", "nixl", "redis", "object", "plot", "dev") for each in extras[name]),
    ]
    named, seen = pins(*INSTALLED), {"baton-serve"}
    queue = [Requirement(each) for each in wanted]
    while queue:
        requirement = queue.pop()
        asked = [{"extra": extra} for extra in requirement.extras or ("",)]
        name = canonicalize_name(requirement.name)
        if name in seen or not any(requirement.marker is None or requirement.marker.evaluate(each) for each in asked):
            continue
        seen.add(name)
        assert name in named, f"{name} is needed and in no requirements/*.txt: make lock"
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate(each) for each in asked):
                queue.append(needed)


def test_build_requirements_are_among_them() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    named = pins("build")
    for requirement in map(Requirement, build):
        assert requirement.specifier.contains(named[requirement.name].removeprefix("=="))
    assert "ziglang" in named  # what hatch_build.py asks for where there is no compiler


def images(text: str) -> list[str]:
    """The images that a Dockerfile begins with which neither an argument without default nor a stage names."""
    arguments = dict(re.findall(r"^ARG (\w+)(?:=(\S+))?$", text, re.MULTILINE))
    stages = set(re.findall(r"^FROM .* AS (\S+)$", text, re.MULTILINE))
    found = []
    for image in re.findall(r"^FROM (?:--\S+ )*(\S+)", text, re.MULTILINE | re.IGNORECASE):
        name = re.sub(r"\$\{?(\w+)\}?", lambda match: arguments.get(match[1], match[0]), image)
        if name and name not in stages:
            found.append(name)
    return found


def dockerfiles() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if re.search(r"(^|[/.])(Docker|Container)file[^/]*$", name)]


def test_images_are_named_by_digest() -> None:
    paths = dockerfiles()
    assert paths
    for path in paths:
        text = path.read_text()
        assert not [each for each in images(text) if not _BY_DIGEST.fullmatch(each)], path
        if re.search(r"^FROM \$\{PYTHON_IMAGE\}", text, re.MULTILINE):  # given by who builds, and looked at then
            assert re.search(r'^RUN case "\$\{PYTHON_IMAGE\}" in \*@sha256:\?{64}\)', text, re.MULTILINE)
            assert len(re.findall(r"^FROM \$\{PYTHON_IMAGE\}", text, re.MULTILINE)) == 1


def test_an_image_without_a_digest_is_seen() -> None:
    digest = "a" * 64
    assert images(f"FROM x@sha256:{digest} AS one\nFROM one AS two\nARG BASE\nFROM ${{BASE}}\n") == [
        f"x@sha256:{digest}"
    ]
    assert images("ARG BASE=python:3.11\nFROM ${BASE} AS one\nFROM --platform=linux/amd64 debian\n") == [
        "python:3.11",
        "debian",
    ]
