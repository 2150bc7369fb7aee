"""Which bytes of a peer's memory go where: the rows of NIXL's requests, and what a peer says of its arenas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.errors import InvalidRequestError
from baton.kv_cache.arena import MemoryRange, SharedDeviceArena
from baton.kv_transfer.copy.block_copy import BATCH_BYTES, merge_runs
from baton.kv_transfer.pipes.nixl_agent import Rows, segment_type
from baton.kv_transfer.protocol.frames import BadFrameError
from baton.kv_transfer.types import BlockReads, Bytes

BATCH_ROWS = 16_384
"""Rows of one NIXL request at most."""
_MAX_RANKS = 1024
_Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Base:
    """Where blocks are.

    Attributes:
        address: Of the first.
        block_bytes: Bytes per block.
        device: Index of the GPU that has them; ``None``: host memory.
    """

    address: int
    block_bytes: int
    device: int | None = None

    @property
    def kind(self) -> str:
        """What NIXL calls the memory."""
        return segment_type(MemoryRange(self.address, 0, self.device))


def base_of(blocks: Bytes | SharedDeviceArena) -> Base:
    """Return where a target's blocks are."""
    if isinstance(blocks, SharedDeviceArena):
        where = blocks.memory_range()
        return Base(where.address, blocks.block_bytes, where.device)
    return Base(int(blocks.ctypes.data), blocks.shape[1])


def batches(reads: BlockReads, local: Base, base: Base) -> Iterator[tuple[Rows, Rows]]:
    """Cut reads into NIXL requests: rows of where to and where from, neighbours joined."""
    block_bytes, remote_bytes = local.block_bytes, base.block_bytes
    if reads.segments is None:
        if remote_bytes != block_bytes:
            raise InvalidRequestError(f"blocks of {remote_bytes} bytes into blocks of {block_bytes}", field="segments")
        runs = merge_runs(reads.remote_ids, reads.local_ids)
        to, source, sizes = runs[:, 0] * block_bytes, runs[:, 1] * block_bytes, runs[:, 2] * block_bytes
    else:
        segments = reads.segments
        to = (reads.local_ids[:, None] * block_bytes + segments[:, 1]).reshape(-1)
        source = (reads.remote_ids[:, None] * remote_bytes + segments[:, 0]).reshape(-1)
        sizes = np.broadcast_to(segments[:, 2], (len(reads), len(segments))).reshape(-1)
    to, source, sizes = _cut(to, source, sizes)
    if len(sizes) == 0:
        return
    batch = (np.cumsum(sizes) - sizes) // BATCH_BYTES
    edges = np.union1d(np.flatnonzero(np.diff(batch)) + 1, np.arange(0, len(sizes), BATCH_ROWS)).astype(np.int64)
    for first, end in zip(edges.tolist(), [*edges[1:].tolist(), len(sizes)], strict=True):
        part = slice(first, end)
        yield _rows(local, to[part], sizes[part]), _rows(base, source[part], sizes[part])


def _cut(to: _Numbers, source: _Numbers, sizes: _Numbers) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Cut rows longer than a batch."""
    if len(sizes) == 0 or int(sizes.max()) <= BATCH_BYTES:
        return to, source, sizes
    pieces = -(-sizes // BATCH_BYTES)
    of = np.repeat(np.arange(len(sizes)), pieces)
    offsets = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * BATCH_BYTES
    return to[of] + offsets, source[of] + offsets, np.minimum(BATCH_BYTES, sizes[of] - offsets)


def _rows(base: Base, offsets: _Numbers, sizes: _Numbers) -> Rows:
    rows = np.empty((len(sizes), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = offsets + base.address, sizes, base.device or 0
    return rows


def parse_arenas(arenas: object, devices: object) -> tuple[Base, ...]:
    """Read what a peer says of its arenas.

    Args:
        arenas: [[address, bytes per block], ...], one per rank.
        devices: The index of the GPU that has each, or ``None``; ``None``: all are in host memory.

    Raises:
        BadFrameError: Malformed; names the field.
    """
    if not isinstance(arenas, list) or not 0 < len(arenas) <= _MAX_RANKS:
        raise BadFrameError("the peer's arenas are malformed", field="arenas")
    for arena in arenas:
        right = isinstance(arena, list) and len(arena) == 2 and all(type(v) is int and 0 < v < 1 << 63 for v in arena)
        if not right:
            raise BadFrameError("the peer's arenas are malformed", field="arenas")
    found = [None] * len(arenas) if devices is None else devices
    if not isinstance(found, list) or len(found) != len(arenas) or not all(map(_may_be_device, found)):
        raise BadFrameError("the devices of the peer's arenas are malformed", field="devices")
    return tuple(Base(int(address), int(size), device) for (address, size), device in zip(arenas, found, strict=True))


def _may_be_device(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < _MAX_RANKS)
