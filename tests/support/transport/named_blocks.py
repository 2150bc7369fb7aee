"""Blocks of KV by the names that tests give them: their hashes, their content, and memory for them."""

from __future__ import annotations

import hashlib
import mmap

import numpy as np

from baton.types import BlockHash
from baton_kvstore.types import PAGE, KvFormat


def name_of(label: object) -> BlockHash:
    return BlockHash(hashlib.sha256(str(label).encode()).digest())


def names(*labels: object) -> list[BlockHash]:
    return [name_of(label) for label in labels]


def content(name: BlockHash, kind: KvFormat) -> bytes:
    """What the block of this name holds: other bytes for each."""
    return np.random.default_rng(list(name)).bytes(kind.block_bytes)


def buffers(count: int, kind: KvFormat) -> list[memoryview]:
    """Memory for so many blocks, each of which begins with a page."""
    step = -(-kind.block_bytes // PAGE) * PAGE
    view = memoryview(mmap.mmap(-1, count * step))
    return [view[i * step : i * step + kind.block_bytes] for i in range(count)]
