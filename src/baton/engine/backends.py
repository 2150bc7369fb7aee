"""Chooses the attention operator."""

from __future__ import annotations

import logging

from baton_kernels.paged_attention import PagedAttention, TorchPagedAttention

from baton.config import EngineConfig
from baton.engine.loader import LoadedModel

log = logging.getLogger(__name__)


def choose_backend(config: EngineConfig, model: LoadedModel) -> PagedAttention:
    """Return the attention operator for a model's device.

    Raises:
        ConfigError: ``attention_backend`` asks for one that cannot work here.
    """
    return TorchPagedAttention()
