"""Where the demo model is."""

from __future__ import annotations

from pathlib import Path

from baton.errors import ConfigError


def default_model() -> str:
    """Return the demo model's directory: the source tree's where this is one, else the one in the wheel.

    Raises:
        ConfigError: Neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    for path in (package.parents[1] / "models" / "baton-tiny", package / "_models" / "baton-tiny"):
        if (path / "config.json").is_file():
            return str(path)
    raise ConfigError("the demo model is not installed: give --model", field="model")
