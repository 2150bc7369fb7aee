"""Conversion of KV between dtypes while it goes from one mapping to another, fenced by generations as copies are.

Rounds to nearest, ties to even, as ``torch.Tensor.to`` does (``native/dtype_cast.c``).
A block with a finite number that the target's dtype could only hold as infinity is told apart: its KV cannot be had in
that dtype, and a number close to it would be another one.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError
from baton.kv_cache.layout import DTYPE_BYTES
from baton.kv_cache.reshard import Segments
from baton.kv_transfer.copy.block_copy import BATCH_BYTES
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.types import BlockReads, Bytes, Generations, Valid
from baton.native import address_of, function

FORMATS = ("float32", "bfloat16", "float16")
"""Dtypes in the order of their codes in C."""
WIDEST_BITS = 512
_STALE, _RIGHT, _OVER = range(3)
_CONVERT_S = 60.0

Pieces = npt.NDArray[np.uint64]
"""uint64 [m, 3]: offset in the source's block and in the target's, both in bytes, and elements."""
_pointer, _size, _number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_cast_blocks = function(
    *("cast_blocks", None, _number, _number, _number),
    *(_pointer, _pointer, _pointer, _pointer, _pointer, _pointer, _size, _pointer, _size, _pointer),
)


class _Side(ctypes.Structure):
    """The C structure ``side``."""

    _fields_ = (("base", ctypes.c_uint64), ("block_bytes", ctypes.c_uint64))


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """What a read that converts has brought.

    Attributes:
        valid: bool [n], as :meth:`ReadPipe.read` returns; blocks out of range are not.
        out_of_range: bool [n]: blocks with numbers that the target's dtype cannot hold.
    """

    valid: Valid
    out_of_range: Valid


class BlockCaster:
    """Converts blocks from one dtype to another; thread safe.

    Args:
        source: Dtype of what is read.
        target: Dtype of what is written; another one.
        vector_bits: Bound on the vector registers that are used.

    Raises:
        ConfigError: Unknown dtypes, or the same twice.
    """

    def __init__(self, source: str, target: str, *, vector_bits: int = WIDEST_BITS) -> None:
        if source == target or not {source, target} <= set(FORMATS):
            raise ConfigError(f"KV of {source} cannot be converted to {target}", field="kv_dtype")
        self._from_bytes, self._to_bytes = DTYPE_BYTES[source], DTYPE_BYTES[target]
        self._how = FORMATS.index(source), FORMATS.index(target), vector_bits

    def read(self, local: Bytes, remote: Bytes, generations: Generations, reads: BlockReads, wait: Wait) -> Cast:
        """Convert segments of blocks, and say which had the wanted generation before and after.

        Args:
            local: uint8 [blocks, block_bytes], C-contiguous, writable.
            remote: The same with its own number and size of blocks.
            generations: Of the remote blocks, [blocks]; may change at any time.
            reads: In range, with segments; all of their bytes are those of the source's dtype.
            wait: Looked at every ``BATCH_BYTES``.

        Raises:
            DeadlineError, CancelledError: Part of the blocks may have been written.
        """
        pieces = self._pieces(reads.segments_of(remote.shape[1]))
        states = np.full(len(reads), _STALE, dtype=np.uint8)
        batch = max(1, BATCH_BYTES // max(1, reads.bytes_per_block(remote.shape[1])))
        for at in range(0, len(reads), batch):
            wait.check("converting blocks")
            part = slice(at, at + batch)
            self._cast((local, remote), generations, reads.take(part), pieces, states[part])
        return Cast(states == _RIGHT, states == _OVER)

    def _cast(
        self,
        pools: tuple[Bytes, Bytes],
        generations: Generations,
        reads: BlockReads,
        pieces: Pieces,
        states: npt.NDArray[np.uint8],
    ) -> None:
        """Convert blocks of the second pool into the first, and fill in what became of each."""
        ids = [np.ascontiguousarray(x) for x in (reads.remote_ids, reads.generations, reads.local_ids)]
        _cast_blocks(
            *self._how,
            *(ctypes.byref(_Side(address_of(pool), pool.shape[1])) for pool in pools),
            address_of(generations),
            *(address_of(x) for x in ids),
            len(reads),
            address_of(pieces),
            len(pieces),
            address_of(states),
        )

    def _pieces(self, segments: Segments) -> Pieces:
        pieces = segments.astype(np.uint64)
        pieces[:, 2] //= np.uint64(self._from_bytes)
        pieces[:, 1] = pieces[:, 1] // np.uint64(self._from_bytes) * np.uint64(self._to_bytes)
        return pieces


def convert(rows: Bytes, source: str, target: str) -> tuple[Bytes, Valid]:
    """Convert rows of numbers, uint8 [rows, bytes].

    Returns:
        The rows in the target's dtype, uint8 [rows, bytes], and bool [rows]: whether a finite number of the row became
        infinite.
    """
    rows, ids = np.ascontiguousarray(rows), np.arange(len(rows))
    caster, generations = BlockCaster(source, target), np.zeros(len(rows), np.uint64)
    made = np.empty((len(rows), rows.shape[1] // DTYPE_BYTES[source] * DTYPE_BYTES[target]), np.uint8)
    reads = BlockReads(ids, generations, ids, np.array([[0, 0, rows.shape[1]]]))
    cast = caster.read(made, rows, generations, reads, Wait(time.monotonic() + _CONVERT_S))
    return made, cast.out_of_range
