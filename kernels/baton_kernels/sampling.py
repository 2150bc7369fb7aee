"""Chooses a token per row of logits on a CPU: mask, temperature, top-k, top-p, min-p and the draw, in one operator.

The definition is ``baton.engine.sample``: ``filters.filter_batch`` and ``sampler.draw``, with the same random numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from baton_kernels.cpu.library import DTYPE_CODES, CpuLibrary
from baton_kernels.token_mask import TokenMask

MOST_KEPT = 8
"""Tokens that may be left by filters for an operator to say which."""


class SampleCall(ctypes.Structure):
    """The C structure ``SampleOp``; see ``csrc/sampling.cpp``."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_void_p) for name in ("logits", "temperature", "top_p", "min_p", "top_k", "keys")),
        *((name, ctypes.c_void_p) for name in ("masks", "at", "tokens", "kept")),
        *((name, ctypes.c_int64) for name in ("rows", "vocab", "stride", "watched")),
        ("ready", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("dtype", "threads")),
    ]


_Told = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)


class Watch(NamedTuple):
    """Who is told of tokens as they are chosen, in the caller's thread, while other threads choose further ones.

    Attributes:
        ready: Called in order, with rows from one on to before another, and the tokens of all rows.
        rows: Of so many rows, the first ones.
    """

    ready: Callable[[int, int, npt.NDArray[np.int64]], None]
    rows: int


class RowFilter(NamedTuple):
    """How a row's token is chosen: temperature (0: the first of the greatest), top-k (0: all), top-p and min-p."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


class CpuSampler:
    """The C++ operator."""

    def __init__(self, library: CpuLibrary) -> None:
        self._run = library.sample

    def __call__(
        self,
        logits: torch.Tensor,
        filters: Sequence[RowFilter],
        keys: npt.NDArray[np.uint64],
        masks: Sequence[TokenMask | None] = (),
        at: npt.NDArray[np.int64] | None = None,
        kept: npt.NDArray[np.int64] | None = None,
        watch: Watch | None = None,
    ) -> npt.NDArray[np.int64]:
        """Return a token per row, -1 where the logits that may be chosen hold NaN or their greatest is infinite.

        Args:
            logits: [R or more, vocab] of float32, bfloat16 or float16, rows of any stride; not changed.
            filters: R of them.
            keys: [R], what the random numbers of the draws come from.
            masks: R of them, contiguous: tokens that may be chosen (``None``: all), as if the logits of the others were
                minus infinity; none: all tokens of all rows.
            at: int64 [R], the row of the logits that each is for; default: the first R, one each.
            kept: int64 [R, MOST_KEPT], written: for rows that draw and have filters, the tokens that these leave,
                padded with -1, if they are no more, and the same whichever others a mask forbids; else -1 first.
            watch: Who is told of tokens meanwhile.

        Raises:
            Exception: What ``watch`` raised; all tokens are chosen then.
        """
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        numbers = np.array(filters, np.float64).reshape(len(filters), 4)
        temperature, top_p, min_p = np.ascontiguousarray(numbers[:, (0, 2, 3)].T.astype(np.float32))
        top_k = numbers[:, 1].astype(np.int64)
        keys = np.ascontiguousarray(keys, np.uint64)
        if at is not None:
            at = np.ascontiguousarray(at, np.int64)
            if len(at) != len(filters) or (len(at) and not 0 <= at.min() <= at.max() < len(logits)):
                raise ValueError(f"at has {len(at)} of {len(filters)} rows, of {len(logits)} rows of logits")
        tokens = np.empty(len(filters), np.int64)
        addresses = np.array([0 if mask is None else mask.ctypes.data for mask in masks], np.uint64)
        failures: list[BaseException] = []

        def told(begin: int, end: int) -> None:
            try:
                if watch is not None and not failures:
                    watch.ready(begin, end, tokens)
            except BaseException as failure:  # nothing may leave a function that C calls
                failures.append(failure)

        callback = None if watch is None else _Told(told)
        call = SampleCall(
            logits.data_ptr(),
            *(array.ctypes.data for array in (temperature, top_p, min_p, top_k, keys)),
            *(addresses.ctypes.data if addresses.any() else None, None if at is None else at.ctypes.data),
            *(tokens.ctypes.data, None if kept is None else kept.ctypes.data),
            *(len(filters), logits.shape[1], logits.stride(0), 0 if watch is None else watch.rows),
            None if callback is None else ctypes.cast(callback, ctypes.c_void_p).value,
            *(DTYPE_CODES[logits.dtype], torch.get_num_threads()),
        )
        self._run(ctypes.byref(call))
        if failures:
            raise failures[0]
        return tokens
