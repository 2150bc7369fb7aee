"""The C++ operators that mask logits and choose tokens on a CPU; where there are none, torch does."""

from __future__ import annotations

import functools
import logging

from baton_kernels.cpu import OperatorsMissingError, load_library, runnable_variants
from baton_kernels.cpu.library import CpuLibrary
from baton_kernels.sampling import CpuSampler
from baton_kernels.token_mask import CpuTokenMask

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
def cpu_token_mask() -> CpuTokenMask | None:
    """Return the operator of this processor that masks logits, or ``None`` where it was not built."""
    library = _library()
    return None if library is None else CpuTokenMask(library)
