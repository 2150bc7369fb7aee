"""What a model's ``generation_config.json`` has as defaults of sampling parameters."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.errors import ConfigError, InvalidRequestError, shown
from baton.tokenizer.model_files import read_json
from baton.types import SamplingParams

log = logging.getLogger(__name__)

_FIELDS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "temperature": ("temperature", (int, float)),
    "top_p": ("top_p", (int, float)),
    "top_k": ("top_k", (int,)),
    "min_p": ("min_p", (int, float)),
    "repetition_penalty": ("repetition_penalty", (int, float)),
    "max_new_tokens": ("max_tokens", (int,)),
}
"""Field of :class:`SamplingParams` and types, by the names in the file."""


def sampling_defaults(directory: Path) -> Mapping[str, Any]:
    """Return the sampling parameters that a model's author recommends, by the fields of :class:`SamplingParams`.

    Values that cannot be used are left out and logged: they must not keep a model from being served.

    Args:
        directory: The model's directory or GGUF file.
    """
    file = directory / "generation_config.json"
    try:
        config = read_json(file)
    except ConfigError as error:
        log.warning("%s", error.message)
        return {}
    found: dict[str, Any] = {}
    for name, (field, types) in _FIELDS.items():
        value = config.get(name)
        if value is None:
            continue
        if type(value) not in types or not _is_valid(field, value):
            log.warning("%s: %s %s is left out", file, name, shown(value))
            continue
        found[field] = value
    return found


def _is_valid(field: str, value: Any) -> bool:
    try:
        SamplingParams(**{field: value}).validate()
    except InvalidRequestError:
        return False
    return True
