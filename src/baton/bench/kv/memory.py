"""Where a side's blocks lie: in host memory, or in that of a device, which is reached by copies alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baton.bench.kv.specs import HOST, Ids, Shape
from baton.errors import ConfigError, shown
from baton.kv_cache.arena import Arena, HostArena, whole_blocks
from baton.kv_cache.shards import KVShards

if TYPE_CHECKING:
    from baton.engine.device.compute import ComputeDevice

Bytes = npt.NDArray[np.uint8]
_BATCH_BYTES = 32 << 20
"""Of blocks that are on their way between a device and this process, at a time."""


def device_of(memory: str) -> ComputeDevice:
    """Return the device whose memory is meant.

    Raises:
        ConfigError: There is none, or it cannot be used; names ``memory``.
    """
    try:
        from baton.engine.device.compute import compute_device
    except ImportError as error:
        raise ConfigError(f"--memory {memory} needs torch: pip install 'baton-serve[gpu]'", field="memory") from error
    try:
        return compute_device(memory)
    except ConfigError as error:
        raise ConfigError(f"--memory: {error.message}", field="memory") from error


def parse_memory(text: str) -> tuple[str, str]:
    """Read ``--memory``: the sources' memory and the targets', which is the same if one is named.

    Raises:
        ConfigError: It is neither ``host`` nor a device, or two.
    """
    names = tuple("cuda:0" if name == "cuda" else name for name in text.split(","))
    right = all(re.fullmatch(r"interpret|cuda:\d{1,3}", name) for name in names) and len(names) in (1, 2)
    if names != (HOST,) and not right:
        raise ConfigError(
            f"--memory is host, cuda, cuda:1, cuda:0,cuda:1 (sources, targets) or interpret; got {shown(text)}",
            field="memory",
        )
    return names[0], names[-1]


def new_shards(shape: Shape, memory: str, num_blocks: int) -> KVShards:
    """Allocate the arenas of all ranks.

    Raises:
        ConfigError: They do not fit the device, or there is none.
    """
    return KVShards([new_arena(memory, num_blocks, layout.block_bytes) for layout in shape.layouts()])


def new_arena(memory: str, num_blocks: int, block_bytes: int) -> Arena:
    """Allocate an arena; see :func:`new_shards`."""
    if memory == HOST:
        return HostArena(num_blocks, block_bytes)
    from baton.engine.device.arena import DeviceArena

    return DeviceArena(device_of(memory), num_blocks, block_bytes)


def fill(arena: Arena, write: Callable[[Bytes, int], None]) -> None:
    """Write all blocks.

    Args:
        arena: Whose.
        write: Writes blocks, uint8 [n, block_bytes], given the id of the first.
    """
    if arena.mapped:
        write(arena.blocks, 0)
        return
    for ids in _batches(np.arange(arena.num_blocks), arena.block_bytes):
        rows = np.zeros((len(ids), arena.block_bytes), np.uint8)
        write(rows, int(ids[0]))
        arena.write_from(rows.reshape(-1), whole_blocks(ids, arena.block_bytes))


def wipe(arena: Arena, value: int) -> None:
    """Set every byte of the blocks."""

    def write(rows: Bytes, first: int) -> None:
        rows[:] = value

    fill(arena, write)


def blocks_of(arena: Arena, ids: Ids) -> Iterator[tuple[int, Bytes, Ids]]:
    """Yield blocks batch by batch: place of the first among ``ids``, an array that has them, and their rows in it."""
    if arena.mapped:
        yield 0, arena.blocks, ids
        return
    at = 0
    for some in _batches(ids, arena.block_bytes):
        rows = np.empty((len(some), arena.block_bytes), np.uint8)
        arena.read_into(rows.reshape(-1), whole_blocks(some, arena.block_bytes))
        yield at, rows, np.arange(len(some))
        at += len(some)


def _batches(ids: Ids, block_bytes: int) -> Iterator[Ids]:
    count = max(1, _BATCH_BYTES // block_bytes)
    for at in range(0, len(ids), count):
        yield ids[at : at + count]
