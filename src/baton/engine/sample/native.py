"""The operators that mask logits and choose tokens: C++ on a CPU, Triton on a GPU; where there are none, torch does."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from baton.config import EngineConfig
from baton_kernels.cpu import OperatorsMissingError, load_library, runnable_variants
from baton_kernels.cpu.library import CpuLibrary, ThreadTeam
from baton_kernels.random_numbers import Draws
from baton_kernels.sampling import CpuSampler, RowFilter, Watch
from baton_kernels.token_mask import CpuTokenMask, TokenMask

ChooseOnDevice = Callable[..., torch.Tensor]
"""As :class:`baton_kernels.gpu.sampling.TritonSampler` is called."""


class ChooseTokens(Protocol):
    """As :class:`baton_kernels.sampling.CpuSampler` is called."""

    def __call__(
        self,
        logits: torch.Tensor,
        filters: Sequence[RowFilter],
        draws: Draws,
        masks: Sequence[TokenMask | None],
        *,
        at: Sequence[int] | None = None,
        again: bool = False,
        kept: npt.NDArray[np.int64] | None = None,
        watch: Watch | None = None,
    ) -> list[int]:
        """Return a token per row."""


_log = logging.getLogger(__name__)


@functools.cache
def _library() -> CpuLibrary | None:
    variants = runnable_variants()
    if not variants:
        return None
    try:
        return load_library(variants[0])
    except OperatorsMissingError as error:
        _log.warning("tokens are sampled in torch, several times slower: %s", error)
        return None


@functools.cache
def cpu_sampler() -> CpuSampler | None:
    """Return the operator of this processor that samples, or ``None`` where it was not built."""
    library = _library()
    return None if library is None else CpuSampler(library)


@functools.cache
def gpu_sampler(device: torch.device) -> ChooseOnDevice | None:
    """Return the operator of a GPU that samples, or ``None`` without Triton. Its tokens are on the device."""
    try:
        from baton_kernels.gpu.sampling import TritonSampler
    except ImportError as error:
        _log.warning("tokens are sampled in torch, several times slower: %s", error)
        return None
    return TritonSampler(device)


def token_sampler(device: torch.device, *, on_gpu: bool = False) -> ChooseTokens | None:
    """Return the operator that samples where logits are, or ``None``.

    Args:
        device: Of the logits.
        on_gpu: Whether it is to be that of a GPU, which Triton's interpreter runs where logits are on a CPU.
    """
    if not on_gpu and device.type == "cpu":
        return cpu_sampler()
    sampler = gpu_sampler(device)
    if sampler is None:
        return None

    def choose(
        logits: torch.Tensor,
        filters: Sequence[RowFilter],
        draws: Draws,
        masks: Sequence[TokenMask | None],
        *,
        at: Sequence[int] | None = None,
        again: bool = False,
        kept: npt.NDArray[np.int64] | None = None,
        watch: Watch | None = None,
    ) -> list[int]:
        keys = draws.keys(at, [again and one.unfiltered for one in filters])
        if at is not None:
            logits = logits[torch.tensor(at, device=logits.device)]
        tokens: list[int] = sampler(logits, filters, keys, masks).tolist()
        if watch is not None:
            watch.ready(0, len(watch.rows), tokens)
        return tokens

    return choose


@functools.cache
def cpu_token_mask() -> CpuTokenMask | None:
    """Return the operator of this processor that masks logits, or ``None`` where it was not built."""
    library = _library()
    return None if library is None else CpuTokenMask(library)


def crowded_team(config: EngineConfig) -> ThreadTeam | None:
    """Return the threads of forward passes, if these leave no processor to another thread; ``None``: they do."""
    used = config.threads * config.tp * config.pp
    if not config.device.startswith("cpu") or used < len(os.sched_getaffinity(0)) or _library() is None:
        return None
    return ThreadTeam(config.threads)
