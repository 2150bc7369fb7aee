"""KV blocks in files: a KV connector for Baton, found by its entry point ``files``."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from baton.errors import ConfigError
from baton.kv_cache.connector import KVConnector, LoadPlan, LoadRequest, LoadUpdate, TransferStats
from baton.kv_transfer.connector.registry import ConnectorContext
from baton.types import BlockHash, BlockId, PrefillPath, RequestId

log = logging.getLogger(__name__)
DIGEST_BYTES = 32
MAX_WAITING_SAVES = 1024


def make_connector(context: ConnectorContext) -> FileConnector:
    """Build the connector; its only option is ``path``.

    Raises:
        ConfigError: No path, or another option.
    """
    unknown = set(context.options) - {"path"}
    if unknown or "path" not in context.options:
        raise ConfigError("the files connector has one option: path", field="kv_connector_options")
    return FileConnector(context, Path(context.options["path"]))


@dataclass(eq=False)
class _Load:
    request_id: RequestId
    num_local_tokens: int
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[BlockId, ...]
    cancelled: threading.Event = field(default_factory=threading.Event)


class FileConnector(KVConnector):
    """Saves every full block that is computed, loads every one that is there.

    A file is a digest (SHA-256) and the block's bytes on each rank, one after the other.
    """

    def __init__(self, context: ConnectorContext, path: Path) -> None:
        self._arenas = context.shards.arenas
        self._generations = context.shards.primary.generations
        self._block_size, self._wake = context.fingerprint.block_size, context.wake
        self._folder = path / context.fingerprint.digest().hex()[:32]
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts can be told from KV
        self._loads: dict[RequestId, _Load] = {}
        self._done: deque[LoadUpdate] = deque()
        self._readers = ThreadPoolExecutor(2, "baton-files-read")
        self._writer = ThreadPoolExecutor(1, "baton-files-write")
        self._room = threading.BoundedSemaphore(MAX_WAITING_SAVES)

    def plan_load(self, request: LoadRequest, num_local_tokens: int) -> LoadPlan | None:
        """Count the leading blocks that are there; the last token is left to compute, for its logits."""
        size = self._block_size
        first, count = num_local_tokens // size, 0
        for block_hash in request.hashes[first : (len(request.token_ids) - 1) // size]:
            if not self._file(block_hash).exists():
                break
            count += 1
        return LoadPlan((first + count) * size) if count else None

    def start_load(self, request: LoadRequest, num_local_tokens: int, block_ids: Sequence[BlockId]) -> None:
        """Read in the background."""
        size = self._block_size
        wanted = slice(num_local_tokens // size, (len(request.token_ids) - 1) // size)
        load = _Load(request.request_id, num_local_tokens, tuple(request.hashes[wanted]), tuple(block_ids[wanted]))
        self._loads[request.request_id] = load
        self._readers.submit(self._run, load)

    def cancel_load(self, request_id: RequestId) -> None:
        """Stop before the next block."""
        load = self._loads.get(request_id)
        if load is not None:
            load.cancelled.set()

    def poll_loads(self) -> list[LoadUpdate]:
        """Return the loads that ended."""
        updates = []
        while self._done:
            update = self._done.popleft()
            del self._loads[update.request_id]
            updates.append(update)
        return updates

    def has_pending(self) -> bool:
        """Whether loads run."""
        return bool(self._loads)

    def blocks_computed(
        self, request_id: RequestId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash], num_tokens: int
    ) -> None:
        """Save the full blocks that no file holds yet; when the disk is far behind, some are left out."""
        for block_id, block_hash in zip(block_ids, hashes, strict=False):
            if self._file(block_hash).exists() or not self._room.acquire(blocking=False):
                continue
            content = b"".join(arena.blocks[block_id].tobytes() for arena in self._arenas)
            self._writer.submit(self._save, block_hash, content).add_done_callback(lambda _: self._room.release())

    def close(self) -> None:
        """End all loads; what waits to be written is written."""
        for load in list(self._loads.values()):
            load.cancelled.set()
        self._readers.shutdown(wait=True)
        self._writer.shutdown(wait=True)

    def _file(self, block_hash: BlockHash) -> Path:
        return self._folder / block_hash.hex()

    def _run(self, load: _Load) -> None:
        valid, error = 0, None
        try:
            for block_hash, block_id in zip(load.hashes, load.block_ids, strict=True):
                if load.cancelled.is_set() or not self._read(block_hash, block_id):
                    break
                valid += 1
        except OSError as failure:
            error = f"reading KV from {self._folder} failed: {failure}"
        tokens = valid * self._block_size
        block_bytes = sum(arena.block_bytes for arena in self._arenas)
        stats = TransferStats(
            path=PrefillPath.STORE if valid else PrefillPath.LOCAL,
            source=str(self._folder),
            pipe="files",
            kv_bytes=valid * block_bytes,
            transferred_tokens=tokens,
        )
        self._done.append(LoadUpdate(load.request_id, load.num_local_tokens + tokens, stats=stats, error=error))
        self._wake()

    def _read(self, block_hash: BlockHash, block_id: BlockId) -> bool:
        """Read a block into the pool; ``False``: it is not there, or not whole."""
        try:
            data = self._file(block_hash).read_bytes()
        except FileNotFoundError:
            return False
        digest, content = data[:DIGEST_BYTES], memoryview(data)[DIGEST_BYTES:]
        whole = len(content) == sum(arena.block_bytes for arena in self._arenas)
        if not whole or hashlib.sha256(content).digest() != digest:
            log.error("%s is damaged: removed", self._file(block_hash))
            self._file(block_hash).unlink(missing_ok=True)
            return False
        at = 0
        for arena in self._arenas:
            arena.blocks[block_id] = np.frombuffer(content[at : at + arena.block_bytes], dtype=np.uint8)
            at += arena.block_bytes
        return True

    def _save(self, block_hash: BlockHash, content: bytes) -> None:
        target = self._file(block_hash)
        part = target.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        try:
            part.touch(mode=0o600)
            part.write_bytes(hashlib.sha256(content).digest() + content)
            part.rename(target)
        except OSError as error:
            log.error("a block could not be saved: %s", error)
            part.unlink(missing_ok=True)
