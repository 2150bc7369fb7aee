"""Forbids tokens: sets logits to minus infinity where a row's mask has no bit.

A mask has a bit per token, uint32 [ceil(vocab / 32)]: token ``t`` is bit ``t % 32`` of word ``t // 32``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from baton_kernels.cpu.library import DTYPE_CODES, CpuLibrary

TokenMask: TypeAlias = npt.NDArray[np.uint32]
Upload: TypeAlias = Callable[..., list[torch.Tensor]]
"""Copies arrays to a device, as tensors of their shapes, in one copy that the host does not wait for."""


def upload_to(device: torch.device) -> Upload:
    """Return copies to a device that the host waits for."""
    return lambda *arrays: [torch.from_numpy(array).to(device) for array in arrays]


def mask_words(vocab: int) -> int:
    """Return the number of words of a mask."""
    return -(-vocab // 32)


def pack_mask(allowed: npt.NDArray[np.bool_]) -> TokenMask:
    """Return the mask of allowed tokens bool [vocab]."""
    padded = np.zeros(32 * mask_words(len(allowed)), np.bool_)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


def unpack_mask(mask: TokenMask, vocab: int) -> npt.NDArray[np.bool_]:
    """Return bool [vocab]: which tokens a mask allows."""
    return np.unpackbits(mask.view(np.uint8), count=vocab, bitorder="little").view(np.bool_)


def has_token(mask: TokenMask, token: int) -> bool:
    """Whether a mask allows a token."""
    return bool(mask[token >> 5] >> (token & 31) & 1)


def mask_tokens(
    logits: torch.Tensor, rows: Sequence[int], masks: Sequence[TokenMask], upload: Upload | None = None
) -> None:
    """The definition: forbid tokens in place, on any device.

    Args:
        logits: [R, vocab] of any float dtype.
        rows: Indices of rows that have a mask.
        masks: Masks of these rows.
        upload: Copies arrays to the logits' device; default: copies that the host waits for.
    """
    # Words are copied to the device, a 32nd of the number of tokens, and become bits there.
    packed = np.stack(masks).view(np.int32)
    places = np.array(rows, np.int64)
    words, at = (upload or upload_to(logits.device))(packed, places)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (words[:, :, None] >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[at] = logits[at].masked_fill_(~allowed, float("-inf"))


class TokenMaskCall(ctypes.Structure):
    """The C structure ``TokenMaskOp`` of ``csrc/operators.h``."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_void_p) for name in ("logits", "rows", "masks")),
        *((name, ctypes.c_int64) for name in ("count", "vocab", "stride")),
        *((name, ctypes.c_int32) for name in ("dtype", "threads")),
    ]


class CpuTokenMask:
    """The C++ operator that forbids tokens."""

    def __init__(self, library: CpuLibrary) -> None:
        self._run = library.mask_tokens

    def __call__(self, logits: torch.Tensor, rows: Sequence[int], masks: Sequence[TokenMask]) -> None:
        """Forbid tokens in place; see :func:`mask_tokens`.

        Args:
            logits: [R, vocab] of float32, bfloat16 or float16, with neighbouring columns.
            rows: Indices of rows that have a mask.
            masks: Masks of these rows, contiguous.
        """
        at = np.array(rows, np.int64)
        addresses = np.array([mask.ctypes.data for mask in masks], np.uint64)
        call = TokenMaskCall(
            *(logits.data_ptr(), at.ctypes.data, addresses.ctypes.data),
            *(len(rows), logits.shape[1], logits.stride(0), DTYPE_CODES[logits.dtype], torch.get_num_threads()),
        )
        self._run(ctypes.byref(call))
