"""Finding, reading and comparing a model's tokenizer files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.errors import ConfigError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_DIGEST_PARTS = ("added_tokens", "model", "normalizer", "pre_tokenizer")


def model_directory(path: str | Path, files: Sequence[str] = TOKENIZER_FILES) -> Path:
    """Return the local directory of a model.

    Args:
        path: A directory, or a hub name such as ``org/name``.
        files: Patterns of the files to download of a model on the hub; default: the tokenizer's.

    Raises:
        ConfigError: Neither a directory nor a repository that can be reached.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    name = str(path)
    if local.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ConfigError(f"{name} is not a directory with a model in it", field="model")
    # Imported here: a local directory needs none of it.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except Exception as error:
        # The hub client has a family of its own for "no such repository" and raises OSError, ValueError and its HTTP
        # library's errors for the rest; to the caller all mean that the files can't be had.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{name} is neither a local directory nor a hub model that can be downloaded: {reason}",
            field="model",
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no such file.

    Raises:
        ConfigError: The file holds no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object", field="model")
    return value


def token_content(value: Any) -> str | None:
    """Return a special token's text, written as a string or as ``{"content": ...}``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def tokenizer_digest(model: str | Path) -> str:
    """Return the hex digest of the parts of ``tokenizer.json`` that decide which ids a text becomes.

    Args:
        model: A model's directory. Empty if it is none (a hub name, say) or has no such file.

    Raises:
        ConfigError: The file cannot be read.
    """
    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        return ""
    try:
        content = json.loads(file.read_bytes())
        parts = {name: content.get(name) for name in _DIGEST_PARTS}
        merges = (parts["model"] or {}).get("merges")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", field="model") from error
    if merges:
        # Written as "a b" by older libraries and as ["a", "b"] by newer ones.
        parts["model"]["merges"] = [" ".join(pair) if isinstance(pair, list) else pair for pair in merges]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
