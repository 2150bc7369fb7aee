"""The Helm chart, rendered by Helm's own engine as an install would do it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm/baton"
EXAMPLES = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
RELEASE, NAMESPACE = "demo", "prod"
_MADE = {"token", "ticket-key", "tenant-secret", "api-key", "password"}

Manifest = dict[str, Any]


def example(name: str) -> dict[str, Any]:
    """Return the values of an example of ``ci/``."""
    values: dict[str, Any] = yaml.safe_load((CHART / f"ci/{name}-values.yaml").read_text(encoding="utf-8"))
    return values


def render(values: dict[str, Any] | None = None, *, notes: bool = False) -> str:
    """Return all templates' output, or the notes'.

    Raises:
        helm_python.HelmError: The values do not fit the schema, or a template refuses them.
    """
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        found = chart.render(values or None, name=RELEASE, namespace=NAMESPACE)
    wanted = {name: text for name, text in sorted(found.items()) if name.endswith("NOTES.txt") is notes}
    if notes:
        return "".join(wanted.values())
    return "".join(
        f"---\n# {name.removeprefix('baton/templates/')}\n{text.strip()}\n"
        for name, text in wanted.items()
        if text.strip()
    )


def manifests(values: dict[str, Any] | None = None) -> list[Manifest]:
    """Return the objects that an install with these values makes, tests included."""
    return [each for each in yaml.safe_load_all(render(values)) if each]


def without_secrets(text: str) -> str:
    """Return rendered templates with what is drawn at random replaced."""
    drawn = {
        str(value)
        for each in yaml.safe_load_all(text)
        if each and each["kind"] == "Secret"
        for key, value in each["stringData"].items()
        if key in _MADE
    }
    return re.sub("|".join(map(re.escape, sorted(drawn))) or r"(?!)", "DRAWN", text)


def pods(objects: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield each object that has pods, with its pod template (a pod is its own)."""
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet"):
            yield each, each["spec"]["template"]
        elif each["kind"] == "Pod":
            yield each, each


def named(objects: list[Manifest], kind: str, name: str) -> Manifest:
    """Return an object by kind and name."""
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def arguments(objects: list[Manifest], name: str) -> dict[str, str]:
    """Return the flags of the service in an object with pods."""
    (pod,) = [pod for owner, pod in pods(objects) if owner["metadata"]["name"] == name]
    words = [word.removeprefix("--").partition("=") for word in pod["spec"]["containers"][0]["args"]]
    return {flag: value for flag, _, value in words}
