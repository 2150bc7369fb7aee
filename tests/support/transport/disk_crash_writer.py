"""A process that writes to a disk tier until it is killed, and tells what was acknowledged and what was synced."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import queue
import random
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from baton.types import BlockHash
from baton_kvstore.tiers.disk.log import DiskLog
from baton_kvstore.tiers.disk.tier import DiskTier
from baton_kvstore.types import KvFormat

BLOCK = 8192
KINDS = [KvFormat(bytes([i]) * 32, bytes([i + 100]) * 32, BLOCK) for i in range(2)]
MAX_BYTES = 4 << 30
"""Never reached: a block that is dropped to make room would look like one that was lost."""
LABELS = 64


def name_of(label: int) -> BlockHash:
    return BlockHash(hashlib.sha256(b"block %d" % label).digest())


@cache
def content(kind: KvFormat, name: BlockHash) -> bytes:
    seed = int.from_bytes(hashlib.sha256(kind.key + name).digest()[:8], "little")
    return np.random.default_rng(seed).bytes(BLOCK)


def open_log(path: str) -> DiskLog:
    return DiskLog(path, max_bytes=MAX_BYTES, segment_bytes=1 << 20)


def write_until_killed(path: str, seed: int, news: Connection, synced_to: str) -> None:
    """Put and delete at random; a message before and one after each, the latter once it was synced."""
    _note_syncs(synced_to)
    rng = random.Random(seed)
    tier = DiskTier(
        open_log(path),
        queue_bytes=4 << 20,
        sync_interval_s=0.002,
        checkpoint_interval_s=0.02,
    )
    memory = memoryview(mmap.mmap(-1, 16 * BLOCK))
    tell(news, "ready")
    while True:
        number = rng.randrange(len(KINDS))
        kind = KINDS[number]
        labels = rng.sample(range(LABELS), rng.randint(1, 16))
        hashes = [name_of(label) for label in labels]
        if rng.random() < 0.03:  # everything of a kind, and with it its files
            tell(news, "deleting", number, [*range(LABELS)])
            if wait(lambda done, kind=kind: tier.delete(kind, None, done)):
                tell(news, "deleted", number, [*range(LABELS)])
            continue
        if rng.random() < 0.2:
            tell(news, "deleting", number, labels)
            if wait(lambda done, kind=kind, hashes=hashes: tier.delete(kind, hashes, done)):
                tell(news, "deleted", number, labels)
            continue
        views = [memory[i * BLOCK : (i + 1) * BLOCK] for i in range(len(labels))]
        for view, name in zip(views, hashes, strict=True):
            view[:] = content(kind, name)
        tell(news, "putting", number, labels)
        written = wait(lambda done, kind=kind, hashes=hashes, views=views: tier.write(kind, hashes, views, done))
        if wait(tier.sync) and all(written):
            tell(news, "put", number, labels)


def tell(news: Connection, *message: object) -> None:
    news.send_bytes(json.dumps(message).encode())


def wait(begin: Callable[[Callable[[Any], None]], object]) -> Any:
    answers: queue.Queue[Any] = queue.Queue()
    begin(answers.put)
    return answers.get()


def _note_syncs(path: str) -> None:
    """After every sync append the file's name and how long it was before: all that a loss of power would leave."""
    notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def noting(sync: Callable[[int], None]) -> Callable[[int], None]:
        def call(fd: int) -> None:
            size = os.fstat(fd).st_size
            sync(fd)
            name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
            os.write(notes, f"{name} {size}\n".encode())

        return call

    os.fsync, os.fdatasync = noting(os.fsync), noting(os.fdatasync)  # type: ignore[assignment]
