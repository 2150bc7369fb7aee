"""What decides a tokenizer's ids, as a digest: two services compare it before they speak of token ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from baton.errors import ConfigError

_PARTS = ("added_tokens", "model", "normalizer", "pre_tokenizer")


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
        parts = {name: content.get(name) for name in _PARTS}
        merges = (parts["model"] or {}).get("merges")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", field="model") from error
    if merges:
        # Written as "a b" by older libraries and as ["a", "b"] by newer ones.
        parts["model"]["merges"] = [" ".join(pair) if isinstance(pair, list) else pair for pair in merges]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
