"""What a KV pool's memory offers, wherever it lies.

Epoch, generations and progress are always in host memory (:class:`~baton.kv_cache.arena.state.ArenaState`): the block
pool raises generations, one-sided readers check them. The blocks' bytes need not be: memory of a device is reached
by explicit copies alone, :meth:`Arena.read_into` and :meth:`Arena.write_from`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.errors import InternalError
from baton.kv_cache.arena.state import Progress
from baton.types import BlockId, Epoch

Bytes = npt.NDArray[np.uint8]
Spans = npt.NDArray[np.int64]
"""int64 [m, 3]: block id, first byte within the block, number of bytes."""


class Arena(Protocol):
    """Memory of ``num_blocks`` blocks of ``block_bytes`` bytes.

    Attributes:
        epoch: 16 random bytes of this arena; a restarted process has another.
        generations: uint64 [num_blocks] in host memory, shared with readers.
        progress: How far the owner's computation is, in host memory, shared with readers.
        mapped: Whether the host addresses the blocks, so that :attr:`blocks` works.
    """

    num_blocks: int
    block_bytes: int
    epoch: Epoch
    generations: npt.NDArray[np.uint64]
    progress: Progress
    mapped: bool

    @property
    def blocks(self) -> Bytes:
        """The blocks as host memory, uint8 [num_blocks, block_bytes].

        Raises:
            InternalError: The host cannot address them (:attr:`mapped` is ``False``).
        """

    @property
    def fd(self) -> int:
        """File descriptor of the memory, for processes on this host; -1 if no other process can map it."""

    def open_read_only(self) -> int:
        """Return a new file descriptor of the memory that cannot be written through; the caller closes it.

        Raises:
            OSError: No other process can map the memory.
        """

    def read_into(self, target: Bytes, spans: Spans) -> None:
        """Copy spans of blocks to host memory, one after the other; returns when the bytes are there.

        Args:
            target: uint8 [the spans' bytes], contiguous.
            spans: What to copy.

        Raises:
            InternalError: A span is not within a block, or ``target`` has another size.
        """

    def write_from(self, source: Bytes, spans: Spans) -> None:
        """Copy host memory to spans of blocks: :meth:`read_into` the other way round."""

    def touch(self) -> None:
        """Make the memory ready, so that no first transfer pays for it."""

    def close(self) -> None:
        """Release the memory's descriptor; harmless if repeated."""


def whole_blocks(block_ids: npt.ArrayLike | list[BlockId], block_bytes: int) -> Spans:
    """Return the spans, int64 [n, 3], of whole blocks."""
    ids = np.asarray(block_ids, np.int64).reshape(-1)
    return np.column_stack([ids, np.zeros_like(ids), np.full_like(ids, block_bytes)])


def checked_spans(
    spans: Spans, num_bytes: int, num_blocks: int, block_bytes: int
) -> Iterator[tuple[slice, int, slice]]:
    """Yield each span as its place in the host buffer, its block and its bytes there.

    Raises:
        InternalError: A span is not within a block, or the buffer has another size than all of them; before any
            is yielded.
    """
    ids, starts, sizes = spans[:, 0], spans[:, 1], spans[:, 2]
    inside = (ids >= 0) & (ids < num_blocks) & (starts >= 0) & (sizes >= 0) & (starts + sizes <= block_bytes)
    if not inside.all() or int(sizes.sum()) != num_bytes:
        raise InternalError(f"spans of {int(sizes.sum())} bytes do not fit a buffer of {num_bytes}, or the blocks")
    at = 0
    for block, start, size in spans.tolist():
        yield slice(at, at + size), block, slice(start, start + size)
        at += size
