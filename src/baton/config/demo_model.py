"""Where the demo model is, and what drafts for it."""

from __future__ import annotations

from pathlib import Path

from baton.errors import ConfigError

DEMO_MODEL = "baton-tiny"
DEMO_DRAFTS = ("draft", "eagle", "eagle3", "medusa")
"""Methods of ``--speculative`` for which there are trained weights, in a directory beside the model's."""


def default_model() -> str:
    """Return the demo model's directory.

    Raises:
        ConfigError: It is not there.
    """
    return _directory(DEMO_MODEL, "the demo model is not installed: give --model", "model")


def default_draft(method: str) -> str:
    """Return the directory of what drafts for the demo model by one of ``DEMO_DRAFTS``.

    Raises:
        ConfigError: It is not there.
    """
    message = f"the demo model's {method} is not installed: give --speculative-model"
    return _directory(f"{DEMO_MODEL}-{method}", message, "speculative_model")


def _directory(name: str, missing: str, field: str) -> str:
    """Return a directory: the source tree's where this is one, else the one in the wheel."""
    package = Path(__file__).resolve().parents[1]
    for path in (package.parents[1] / "models" / name, package / "_models" / name):
        if (path / "config.json").is_file():
            return str(path)
    raise ConfigError(missing, field=field)
