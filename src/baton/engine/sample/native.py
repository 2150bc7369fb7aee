"""The C++ operator that chooses tokens on a CPU; where there is none, torch does."""

from __future__ import annotations

import functools
import logging

from baton_kernels.cpu import OperatorsMissingError, load_library, runnable_variants
from baton_kernels.sampling import CpuSampler

_log = logging.getLogger(__name__)


@functools.cache
def cpu_sampler() -> CpuSampler | None:
    """Return the operator of this processor, or ``None`` where it was not built."""
    variants = runnable_variants()
    if not variants:
        return None
    try:
        return CpuSampler(load_library(variants[0]))
    except OperatorsMissingError as error:
        _log.warning("tokens are sampled in torch, several times slower: %s", error)
        return None
