"""How long a sequence a model serves: its own limit, and where its KV would stop being reusable."""

from __future__ import annotations

import logging
from typing import Any

from baton.engine.models.loader import LoadedModel
from baton.errors import ConfigError

log = logging.getLogger(__name__)


def max_sequence_length(model: LoadedModel) -> int:
    """Return the longest sequence in tokens.

    "longrope" changes the frequencies of all tokens once a sequence is longer than the original length, so that keys
    in the cache would have to be computed again: it is served up to there.

    Raises:
        ConfigError: The model's config names no limit.
    """
    config = model.text_config
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise ConfigError(f"{model.architecture}: its config has no max_position_embeddings", field="model")
    for rope in _rope_parameters(config):
        if rope.get("rope_type") != "longrope":
            continue
        original: Any = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", longest
        )
        if original < longest:
            log.warning("rope type longrope: serving sequences up to %d of %d tokens", original, longest)
            longest = int(original)
    return longest


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rope parameters, of which some models have one set per type of layer."""
    value = getattr(config, "rope_parameters", None)
    if not isinstance(value, dict):
        return []
    if any(isinstance(item, dict) for item in value.values()):
        return [item for item in value.values() if isinstance(item, dict)]
    return [value]
