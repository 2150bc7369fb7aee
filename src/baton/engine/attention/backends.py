"""Chooses the operators for a model's device: the C++ ones where they can be compiled, plain torch elsewhere."""

from __future__ import annotations

import logging

import torch

from baton.config import EngineConfig
from baton.config.paths import cache_dir
from baton.errors import ConfigError
from baton_kernels.cpu import BuildError, CpuLibrary, load_library
from baton_kernels.paged_attention import CpuPagedAttention, PagedAttention, TorchPagedAttention

log = logging.getLogger(__name__)


def cpu_library(config: EngineConfig, device: torch.device) -> CpuLibrary | None:
    """Return the C++ operators, compiled on first use, or ``None`` where they are not wanted or not possible.

    Raises:
        ConfigError: ``attention_backend`` is ``"cpp"`` and they cannot be used.
    """
    wanted = config.attention_backend
    if wanted == "torch":
        return None
    if device.type != "cpu":
        if wanted == "cpp":
            raise ConfigError(f"attention_backend cpp needs device cpu, not {device}", field="attention_backend")
        return None
    try:
        library = load_library(cache_dir())
    except BuildError as error:
        if wanted == "cpp":
            raise ConfigError(f"attention_backend cpp cannot be used: {error}", field="attention_backend") from error
        log.warning("C++ operators are off, attention runs in torch (several times slower): %s", error)
        return None
    log.info("C++ operators: %s (%s)", library.instructions, library.path)
    return library


def choose_attention(library: CpuLibrary | None) -> PagedAttention:
    """Return the attention operator: the library's, or the torch fall-back."""
    return TorchPagedAttention() if library is None else CpuPagedAttention(library)
