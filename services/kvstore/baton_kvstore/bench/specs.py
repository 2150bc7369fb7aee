"""What driver and clients tell each other."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.bench.kv.specs import Shape
from baton.kv_transfer.types import Bytes
from baton.types import BlockHash

MAX_SAMPLES = 4000
"""Requests in one turn of one client: their times go over the control line in one message."""
_ODD = 0x9E3779B97F4A7C15
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Addresses:
    """Where things are; empty or 0: not there.

    Attributes:
        dram: gRPC address of the store in memory that is read.
        dram_put: Of the one that is written.
        disk: Of the store whose blocks lie on disk and that is read.
        disk_put: Of the one that is written.
        disk_path: Folder of the files of ``disk``.
        redis: Port of a redis-server on 127.0.0.1.
    """

    dram: str = ""
    dram_put: str = ""
    disk: str = ""
    disk_put: str = ""
    disk_path: str = ""
    redis: int = 0


@dataclass(frozen=True)
class OpenSpec:
    """A client's part.

    Attributes:
        index: Of the client.
        seed: Of names and bytes.
        shape: Of the blocks.
        blocks: In a request.
        chains: Chains of so many blocks that the stores hold.
        redis_chains: How many of them Redis holds.
        readers: Threads of plain reads.
        where: The servers.
    """

    index: int
    seed: int
    shape: Shape
    blocks: int
    chains: int
    redis_chains: int
    readers: int
    where: Addresses


@dataclass(frozen=True)
class TurnSpec:
    """One turn: requests one after the other for some time.

    Attributes:
        method: ``shm``, ``tcp``, ``disk`` or a baseline.
        op: ``get``, ``put`` or ``contains``.
        clients: That take part, this one among them.
        hit_percent: Share of the requests whose chain is there; of the others not one block is.
        first: Place of the first chain. All clients together go through the chains in turn, over and over.
        start: ``time.monotonic()`` at which all begin.
        seconds: After which no request begins.
    """

    method: str
    op: str
    clients: int
    hit_percent: int
    first: int
    start: float
    seconds: float


def chain_names(seed: int, chain: int, blocks: int) -> list[BlockHash]:
    """Return the names of a chain's blocks."""
    return [BlockHash(hashlib.sha256(b"%d/%d/%d" % (seed, chain, i)).digest()) for i in range(blocks)]


class Pattern:
    """What is in a block: 8-byte words that rise from one that its name decides.

    Args:
        block_bytes: A multiple of 8.
    """

    def __init__(self, block_bytes: int) -> None:
        self._ramp: Words = np.arange(block_bytes // 8, dtype=np.uint64) * np.uint64(_ODD)

    def fill(self, names: list[BlockHash], out: Bytes) -> None:
        """Write blocks, uint8 [blocks, block_bytes]."""
        for name, block in zip(names, out, strict=True):
            np.add(self._ramp, _base(name), out=block.view(np.uint64))

    def wrong(self, names: list[BlockHash], blocks: Bytes) -> int:
        """Count the blocks that are not what they should be; every byte is compared."""
        return sum(
            not np.array_equal(block.view(np.uint64), self._ramp + _base(name))
            for name, block in zip(names, blocks, strict=True)
        )


def _base(name: BlockHash) -> np.uint64:
    return np.uint64(int.from_bytes(name[:8], "little"))
