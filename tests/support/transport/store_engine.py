"""The store connector as an engine uses it: the test is the engine's thread, beside it an event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from baton.config.kvstore import KVStoreConfig
from baton.hashing import block_hashes, root_hash
from baton.kv_cache.arena import HostArena
from baton.kv_cache.connector import LoadRequest, LoadUpdate
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.blocks import BlockFetcher, BlockServer
from baton.kv_transfer.connector.store.backend import StoreOptions
from baton.kv_transfer.connector.store.connector import SavedPool, open_connector
from baton.types import BlockHash, BlockId, InstanceId, RequestId, SamplingParams
from baton_kvstore.server import KVStoreServer

T = TypeVar("T")
BS = 16
LAYOUT = KVLayout((LayerShape(1, 16, 16),), BS, "float32")
KIND = Fingerprint.of(model="tiny", model_digest="d1", rope="", layout=LAYOUT)
BLOCK = KIND.block_bytes
WAIT_S = 120.0


class Host:
    """An event loop in a thread, as a service has one beside its engine's thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def close(self) -> None:
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


STORE_OPTIONS: dict[str, dict[str, Any]] = {"more": {}}
"""What a test's stores are made with besides: the options of its make-up."""


@contextmanager
def store(host: Host, **options: Any) -> Iterator[KVStoreServer]:
    async def start() -> KVStoreServer:
        server = KVStoreServer(KVStoreConfig(**{"capacity_bytes": 64 * BLOCK, **STORE_OPTIONS["more"], **options}))
        await server.start()
        return server

    server = host.run(start())
    try:
        yield server
    finally:
        host.run(server.stop())


class Woken:
    """Whoever polls as the engine does: whenever it is woken."""

    def __init__(self) -> None:
        self.news = threading.Event()

    def wait(self, poll: Callable[[], T]) -> T:
        deadline = time.monotonic() + WAIT_S
        while True:
            found = poll()
            if found:
                return found
            assert self.news.wait(max(0.0, deadline - time.monotonic())), "nobody woke the engine"
            self.news.clear()


class Engine(Woken):
    """A pool, a connector, and what the engine does with them."""

    def __init__(self, host: Host, address: str, *, kind: Fingerprint = KIND, **options: Any) -> None:
        super().__init__()
        self.host = host
        self.arena = HostArena(64, kind.block_bytes)
        self.server = BlockServer(self.arena, kind, InstanceId("prefill-0"))
        self.fetcher = BlockFetcher(self.arena, kind)
        defaults: dict[str, Any] = {
            "cooldown_s": 60.0,
            "call_timeout_s": WAIT_S,
            "load_timeout_s": WAIT_S,
            "save_timeout_s": WAIT_S,
        }
        self.connector = open_connector(
            StoreOptions(address, **{**defaults, **options}),
            pool=SavedPool(self.arena, kind.block_size, lambda: self.server.source),
            fingerprint=kind,
            fetcher=self.fetcher,
            loop=host.loop,
            wake=self.news.set,
        )

    def load(self, request: LoadRequest, local: int = 0, first: int = 32) -> LoadUpdate:
        assert self.connector.plan_load(request, local) is not None
        self.connector.start_load(request, local, blocks_of(request, first))
        (update,) = self.wait(self.connector.poll_loads)
        return update

    def save(self, request: LoadRequest, chunks: Sequence[int] = (10_000,), first: int = 0) -> None:
        """Compute a prompt in chunks, end it, and wait until its blocks may be reused."""
        ids = blocks_of(request, first)
        for i, name in enumerate(request.hashes):
            self.arena.blocks[ids[i]] = content(name)
        for end in chunks:
            tokens = min(end, len(request.token_ids))
            self.connector.blocks_computed(request.request_id, ids, request.hashes[: tokens // BS], tokens)
        if self.connector.request_finished(request.request_id):
            assert self.connector.has_pending()
            assert self.wait(self.connector.poll_releases) == [request.request_id]
        assert not self.connector.poll_releases()

    def close(self) -> None:
        self.host.run(self.connector.aclose())
        self.server.close()
        self.fetcher.close()
        self.arena.close()


@contextmanager
def engine(host: Host, address: str, **options: Any) -> Iterator[Engine]:
    made = Engine(host, address, **options)
    try:
        yield made
    finally:
        made.close()


def prompt(length: int, name: str = "r", *, seed: int = 0, **sampling: Any) -> LoadRequest:
    tokens = np.random.default_rng(seed).integers(0, 1000, 4096)[:length].tolist()
    hashes = block_hashes(tokens, BS, root_hash(KIND.content_key()))
    return LoadRequest(RequestId(name), tokens, 0, SamplingParams(**sampling), hashes)


def blocks_of(request: LoadRequest, first: int) -> list[BlockId]:
    return [BlockId(first + i) for i in range(-(-len(request.token_ids) // BS))]


def content(name: BlockHash) -> np.ndarray:
    return np.resize(np.frombuffer(name, np.uint8), BLOCK)


@contextmanager
def deaf_store() -> Iterator[str]:
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def host_gate(host: Host) -> threading.Event:
    """Hold the host's loop until the event is set."""
    gate = threading.Event()
    host.loop.call_soon_threadsafe(gate.wait, WAIT_S)
    return gate
