"""Where Baton keeps files of its own between runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_dir(env: Mapping[str, str] | None = None) -> Path:
    """Return the folder for what is compiled: ``BATON_CACHE_DIR``, or ``baton`` in the user's cache folder."""
    source = os.environ if env is None else env
    if source.get("BATON_CACHE_DIR"):
        return Path(source["BATON_CACHE_DIR"]).expanduser()
    base = source.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "baton"
