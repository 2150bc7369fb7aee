"""Sampling on a CPU: mask, temperature, top-k, top-p, min-p and the draw of a token per row, in one operator.

The definition is ``baton.engine.sample``: ``filters.filter_batch`` and ``sampler.draw``, with the same random numbers.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from baton_kernels.cpu.library import DTYPE_CODES, CpuLibrary
from baton_kernels.random_numbers import Draws
from baton_kernels.token_mask import TokenMask

MOST_KEPT = 8
"""Largest number of remaining tokens after filters that the operator returns."""
MOST_TOP_K = 2**31 - 1
"""Largest top-k, which exceeds any vocabulary."""


class SampleCall(ctypes.Structure):
    """The C structure ``SampleOp`` of ``csrc/operators.h``."""

    _fields_: ClassVar[list[Any]] = [
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_char_p) for name in ("seeds", "positions", "filters", "masks", "at", "watched")),
        *((name, ctypes.c_void_p) for name in ("tokens", "kept", "ready")),
        *((name, ctypes.c_int64) for name in ("rows", "vocab", "stride", "num_watched")),
        *((name, ctypes.c_int32) for name in ("dtype", "threads", "again")),
    ]


_ReadyCallback = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)


class Watch(NamedTuple):
    """A callback for tokens as they are chosen, in the caller's thread, while other threads choose further ones.

    Attributes:
        ready: Called with two bounds within ``rows`` and the tokens of all rows: the rows between the bounds have their
            tokens. Bounds ascend from call to call.
        rows: Indices of the watched rows, in the order in which they are chosen, before all others.
    """

    ready: Callable[[int, int, Sequence[int]], None]
    rows: Sequence[int]


class RowFilter(NamedTuple):
    """How a row's token is chosen.

    Attributes:
        temperature: Divisor of the logits; 0: the first token with the greatest logit.
        top_k: Number of most likely tokens to draw from; 0: all.
        top_p: Least probability, in sum, of the most likely tokens to draw from; 1: all.
        min_p: Least probability of a token, relative to the most likely one; 0: any.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @property
    def unfiltered(self) -> bool:
        """Whether the token is drawn from all tokens, or from all that the mask allows."""
        return self.temperature > 0.0 and self[1:] == (0, 1.0, 0.0)


@functools.lru_cache(maxsize=1024)
def _packed(row_filter: RowFilter) -> bytes:
    """Return the C structure ``Filter``."""
    temperature, top_k, top_p, min_p = row_filter
    return struct.pack("3fi", temperature, top_p, min_p, min(top_k, MOST_TOP_K))


class CpuSampler:
    """The C++ operator for sampling."""

    def __init__(self, library: CpuLibrary) -> None:
        self._run = library.sample

    def __call__(
        self,
        logits: torch.Tensor,
        filters: Sequence[RowFilter],
        draws: Draws,
        masks: Sequence[TokenMask | None] = (),
        *,
        at: Sequence[int] | None = None,
        again: bool = False,
        kept: npt.NDArray[np.int64] | None = None,
        watch: Watch | None = None,
    ) -> list[int]:
        """Return a token per row; -1 where the allowed logits have NaN, or their greatest is infinite.

        Arguments are packed as bytes: after a forward pass little of NumPy's code is in the caches, and arrays made of
        lists, with their addresses, take several times as long.

        Args:
            logits: [R or more, vocab] of float32, bfloat16 or float16, rows of any stride; not changed.
            filters: Filters of the R rows.
            draws: Draws of R or more rows.
            masks: Masks of the R rows, contiguous: tokens that may be chosen (``None``: all), as if the logits of the
                others were minus infinity; empty: all tokens of all rows.
            at: Index, for each of the R rows, of its logits and draw; default: the first R, in order.
            again: Whether rows without filters draw a second time: with
                :func:`~baton_kernels.random_numbers.next_keys`.
            kept: int64 [R, MOST_KEPT], written: for rows that draw and have filters, the tokens that the filters leave,
                padded with -1, if they fit and do not depend on the tokens that a mask forbids; else -1 first.
            watch: Callback for tokens that are chosen.

        Raises:
            Exception: The callback raised it; all tokens are chosen.
        """
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        count = len(filters)
        own = range(count) if at is None else at
        if len(own) != count or (
            count and not 0 <= min(own) <= max(own) < min(len(logits), len(draws.seeds), len(draws.positions))
        ):
            raise ValueError(
                f"{len(own)} of {count} rows, of {len(logits)} rows of logits and {len(draws.seeds)} draws"
            )
        tokens = array("q", bytes(8 * count))
        masked = any(mask is not None for mask in masks)
        watched = () if watch is None else watch.rows
        if watched and not 0 <= min(watched) <= max(watched) < count:
            raise ValueError(f"rows that are watched: {min(watched)} to {max(watched)} of {count}")
        failures: list[BaseException] = []

        def on_ready(begin: int, end: int) -> None:
            try:
                if watch is not None and not failures:
                    watch.ready(begin, end, tokens)
            except BaseException as failure:  # C code cannot pass exceptions on
                failures.append(failure)

        callback = _ReadyCallback(on_ready) if watched else None
        call = SampleCall(
            logits.data_ptr(),
            array("Q", draws.seeds).tobytes(),
            array("Q", draws.positions).tobytes(),
            b"".join(map(_packed, filters)),
            array("Q", [0 if mask is None else mask.ctypes.data for mask in masks]).tobytes() if masked else None,
            None if at is None else array("q", at).tobytes(),
            array("q", watched).tobytes(),
            tokens.buffer_info()[0],
            None if kept is None else kept.ctypes.data,
            None if callback is None else ctypes.cast(callback, ctypes.c_void_p).value,
            *(count, logits.shape[1], logits.stride(0), len(watched)),
            *(DTYPE_CODES[logits.dtype], torch.get_num_threads(), again),
        )
        self._run(ctypes.byref(call))
        if failures:
            raise failures[0]
        return tokens.tolist()
