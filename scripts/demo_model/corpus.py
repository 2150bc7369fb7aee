"""The corpus: program sources of the Python standard library."""

from __future__ import annotations

import hashlib
from pathlib import Path

Sources = dict[str, str]
"""Texts by POSIX path relative to the library directory."""

HELD_OUT_FRACTION = 0.05
SPLIT_SALT = "baton-tiny held-out split"

# Tests, tables and third-party code rather than programs.
EXCLUDED_PARTS = {"__pycache__", "dist-packages", "encodings", "ensurepip", "idle_test", "msilib", "pydoc_data"}
EXCLUDED_PARTS |= {"site-packages", "test", "tests"}
EXCLUDED_FILES = {"html/entities.py", "this.py", "stringprep.py"}


def load_sources(root: Path) -> Sources:
    """Read the program sources under the library directory, sorted by path."""
    sources: Sources = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_PARTS.intersection(relative.parts) or relative.as_posix() in EXCLUDED_FILES:
            continue
        if any(part.startswith(("config-", "_sysconfigdata")) for part in relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) >= 200:
            sources[relative.as_posix()] = text
    return sources


def is_held_out(path: str) -> bool:
    """Decide by a hash of the path alone, so that other modules don't move the split."""
    digest = hashlib.sha256(f"{SPLIT_SALT}:{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < HELD_OUT_FRACTION


def fingerprint(sources: Sources) -> str:
    """Hash paths and texts, to tell whether two runs had the same corpus."""
    digest = hashlib.sha256()
    for path, text in sources.items():
        digest.update(path.encode() + b"\0" + text.encode() + b"\0")
    return digest.hexdigest()
