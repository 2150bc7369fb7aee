"""Folders of the demo model and of its draft models."""

from __future__ import annotations

from pathlib import Path

from baton.errors import ConfigError

DEMO_MODEL = "baton-tiny"
DEMO_DRAFTS = ("draft", "eagle", "eagle3", "medusa")
"""Methods of ``--speculative`` with trained weights for the demo model, in folders beside the model's."""


def default_model() -> str:
    """Return the demo model's directory.

    Raises:
        ConfigError: The model is not installed.
    """
    return _directory(DEMO_MODEL, "the demo model is not installed: give --model", "model")


def default_draft(method: str) -> str:
    """Return the directory of the demo model's draft weights for one of ``DEMO_DRAFTS``.

    Raises:
        ConfigError: They are not installed.
    """
    message = f"the demo model's {method} is not installed: give --speculative-model"
    return _directory(f"{DEMO_MODEL}-{method}", message, "speculative_model")


def _directory(name: str, missing: str, field: str) -> str:
    """Return a model's directory in the source tree or, in an installed wheel, beside the package."""
    package = Path(__file__).resolve().parents[1]
    for path in (package.parents[1] / "models" / name, package / "_models" / name):
        if (path / "config.json").is_file():
            return str(path)
    raise ConfigError(missing, field=field)
