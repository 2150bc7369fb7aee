"""What can be tuned, where it stands in a deployment's file, and the values next to one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import ConfigError

Settings = dict[str, str | int | float]
"""Values by the names of :data:`TUNABLE`."""
_RATIO = re.compile(r"(\d+)[pP](\d+)[dD]")


@dataclass(frozen=True, slots=True)
class Tunable:
    """A setting.

    Attributes:
        section: Of the file, whose ``flags`` have it; empty: the top.
        default: What holds where the file does not say.
        least: Lowest value.
        most: Highest value.
        factor: Neighbours of a value are so many times as large and as small.
    """

    section: str
    default: str | int | float
    least: float = 1
    most: float = 1 << 20
    factor: float = 2.0


TUNABLE: Mapping[str, Tunable] = {
    "ratio": Tunable("", "1P1D"),
    "max-num-seqs": Tunable("worker", 64, most=1024),
    "max-num-batched-tokens": Tunable("worker", 2048, least=64, most=65536),
    "prefill-chunk": Tunable("worker", 512, least=16, most=65536),
    "remote-prefill-threshold": Tunable("worker", 64, least=1, most=65536, factor=4.0),
    "beta": Tunable("router", 0.5, least=0.01, most=8.0),
}
"""By their names in the file; a new one is a line here."""


def neighbours(name: str, value: str | int | float) -> Iterator[str | int | float]:
    """Yield the values next to one: of a ratio those with as many instances."""
    if name == "ratio":
        match = _RATIO.fullmatch(str(value))
        if match is None:
            raise ConfigError(f"ratio must look like 2P3D, got {value!r}", field="ratio")
        x, y = int(match[1]), int(match[2])
        for prefills, decodes in ((x + 1, y - 1), (x - 1, y + 1)):
            if prefills >= 0 and decodes >= 1:
                yield f"{prefills}P{decodes}D"
        return
    tunable, number = TUNABLE[name], float(value)
    for other in (number * tunable.factor, number / tunable.factor):
        if tunable.least <= other <= tunable.most:
            yield round(other, 4) if isinstance(tunable.default, float) else int(other)


def read_settings(document: Mapping[str, Any], names: tuple[str, ...]) -> Settings:
    """Return the values that a deployment's file has.

    Raises:
        ConfigError: A name cannot be tuned, or a role has a value of its own, which would win.
    """
    found: Settings = {}
    for name in names:
        if name not in TUNABLE:
            raise ConfigError(f"--tune takes {', '.join(TUNABLE)}; got {name!r}", field="tune")
        section = TUNABLE[name].section
        if section == "worker":
            for role in ("prefill", "decode"):
                if name in _flags(document, role):
                    raise ConfigError(
                        f"{role}.flags.{name} would win over what is tuned: move it to worker", field=name
                    )
        values = document if not section else _flags(document, section)
        found[name] = values.get(name, TUNABLE[name].default)
    if "ratio" in found and "ratio" not in document:
        counts = [_replicas(document, role) for role in ("prefill", "decode")]
        found["ratio"] = f"{counts[0]}P{counts[1]}D"
    return found


def with_settings(document: Mapping[str, Any], settings: Settings) -> str:
    """Return a deployment's file with other values; JSON, which is YAML."""
    changed = json.loads(json.dumps(document))
    for name, value in settings.items():
        section = TUNABLE[name].section
        if section:
            changed.setdefault(section, {}).setdefault("flags", {})[name] = value
            continue
        changed[name] = value
        if name == "ratio":
            for role in ("prefill", "decode"):
                changed.get(role, {}).pop("replicas", None)
    return json.dumps(changed, indent=1) + "\n"


def _flags(document: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    return (document.get(section) or {}).get("flags") or {}


def _replicas(document: Mapping[str, Any], role: str) -> int:
    count = (document.get(role) or {}).get("replicas")
    return 1 if count is None else int(count)
