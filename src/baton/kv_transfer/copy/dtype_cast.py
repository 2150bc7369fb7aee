"""Conversion of KV between dtypes while it goes from one mapping to another, fenced by generations as copies are.

Rounds to nearest, ties to even, as ``torch.Tensor.to`` does. A page of C does it where a compiler is, numpy elsewhere.
A block with a finite number that the target's dtype could only hold as infinity is told apart: its KV cannot be had in
that dtype, and a number close to it would be another one.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError
from baton.kv_cache.layout import DTYPE_BYTES
from baton.kv_cache.reshard import Segments
from baton.kv_transfer.copy.block_copy import BATCH_BYTES, fence
from baton.kv_transfer.protocol.deadline import Wait
from baton.kv_transfer.types import BlockReads, Bytes, Generations, Valid
from baton.native import COMPILERS, address_of, load_helper

FORMATS = ("float32", "bfloat16", "float16")
"""Dtypes in the order of their codes in C."""
WIDEST_BITS = 512
_STALE, _RIGHT, _OVER = range(3)

Pieces = npt.NDArray[np.uint64]
"""uint64 [m, 3]: offset in the source's block and in the target's, both in bytes, and elements."""
States = npt.NDArray[np.uint8]
CastBlocks = Callable[[Bytes, Bytes, Generations, BlockReads, Pieces, States], None]
"""Converts blocks of the second array into the first and fills in what became of each."""


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
        native: Whether C may be used.
        compilers: The first of them that is there is used.
        vector_bits: Bound on the vector registers that are used.

    Attributes:
        method: ``"native"`` or ``"numpy"``.

    Raises:
        ConfigError: Unknown dtypes, or the same twice.
    """

    def __init__(
        self,
        source: str,
        target: str,
        *,
        native: bool = True,
        compilers: tuple[str, ...] = COMPILERS,
        vector_bits: int = WIDEST_BITS,
    ) -> None:
        if source == target or not {source, target} <= set(FORMATS):
            raise ConfigError(f"KV of {source} cannot be converted to {target}", field="kv_dtype")
        self._from_bytes, self._to_bytes = DTYPE_BYTES[source], DTYPE_BYTES[target]
        found = _native_cast(source, target, compilers, vector_bits) if native else None
        self.method = "native" if found else "numpy"
        self._cast = found or _numpy_cast(source, target)

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
            self._cast(local, remote, generations, reads.take(part), pieces, states[part])
        return Cast(states == _RIGHT, states == _OVER)

    def _pieces(self, segments: Segments) -> Pieces:
        pieces = segments.astype(np.uint64)
        pieces[:, 2] //= np.uint64(self._from_bytes)
        pieces[:, 1] = pieces[:, 1] // np.uint64(self._from_bytes) * np.uint64(self._to_bytes)
        return pieces


class _Side(ctypes.Structure):
    """The C structure ``side``."""

    _fields_ = (("base", ctypes.c_uint64), ("block_bytes", ctypes.c_uint64))


def _native_cast(source: str, target: str, compilers: tuple[str, ...], vector_bits: int) -> CastBlocks | None:
    library = load_helper(Path(__file__).with_name("dtype_cast.c"), compilers)
    if library is None:
        return None
    function = library.baton_cast_blocks
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    function.argtypes = [number] * 3 + [pointer] * 6 + [size, pointer, size, pointer]
    function.restype = None
    call = functools.partial(function, FORMATS.index(source), FORMATS.index(target), vector_bits)

    def cast(
        local: Bytes, remote: Bytes, generations: Generations, reads: BlockReads, pieces: Pieces, states: States
    ) -> None:
        ids = [np.ascontiguousarray(x) for x in (reads.remote_ids, reads.generations, reads.local_ids)]
        call(
            ctypes.byref(_Side(address_of(local), local.shape[1])),
            ctypes.byref(_Side(address_of(remote), remote.shape[1])),
            address_of(generations),
            *(address_of(x) for x in ids),
            len(reads),
            address_of(pieces),
            len(pieces),
            address_of(states),
        )

    return cast


def _numpy_cast(source: str, target: str) -> CastBlocks:
    size = DTYPE_BYTES[source]

    def cast(
        local: Bytes, remote: Bytes, generations: Generations, reads: BlockReads, pieces: Pieces, states: States
    ) -> None:
        good = np.flatnonzero(generations[reads.remote_ids] == reads.generations)
        over = np.zeros(len(reads), dtype=np.bool_)
        for begin, to, elements in pieces.tolist():
            data = remote[reads.remote_ids[good], begin : begin + elements * size]
            made, lost = convert(data, source, target)
            local[reads.local_ids[good], to : to + made.shape[1]] = made
            over[good] |= lost
        states[good] = np.where(over[good], _OVER, _RIGHT)
        fence()
        states[generations[reads.remote_ids] != reads.generations] = _STALE

    return cast


def convert(data: Bytes, source: str, target: str) -> tuple[Bytes, Valid]:
    """Convert rows of numbers, uint8 [rows, bytes].

    Returns:
        The rows in the target's dtype, uint8 [rows, bytes], and bool [rows]: whether a finite number of the row became
        infinite.
    """
    numbers = _to_float32(np.ascontiguousarray(data), source)
    made = _from_float32(numbers, target)
    lost = np.isfinite(numbers) & ~np.isfinite(_to_float32(made, target))
    return made, np.any(lost, axis=1)


def _to_float32(data: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return data.view(dtype).astype(np.float32)


def _from_float32(numbers: npt.NDArray[np.float32], dtype: str) -> Bytes:
    if dtype != "bfloat16":
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # what is lost is looked at by the caller
            return numbers.astype(dtype).view(np.uint8)
    bits = numbers.view(np.uint32)
    high = bits >> np.uint32(16)
    near = (bits + np.uint32(0x7FFF) + (high & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), high | np.uint32(0x40), near).astype(np.uint16).view(np.uint8)
