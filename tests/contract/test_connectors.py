"""What every connector that saves and loads must keep, whatever stands behind it. The test is the engine's thread."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.transport.store_engine import BS, KIND, WAIT_S, Host, Woken, blocks_of, content, host_gate, prompt

from baton.config.kvstore import KVStoreConfig
from baton.kv_cache.arena import HostArena
from baton.kv_cache.connector import KVConnector, LoadRequest, LoadUpdate
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_cache.shards import KVShards, shard_layout, shard_specs
from baton.kv_transfer.blocks import BlockFetcher, BlockServer
from baton.kv_transfer.connector.multi import MultiConnector
from baton.kv_transfer.connector.store.backend import StoreBackend, StoreLimits, StoreOptions, StoreUse
from baton.kv_transfer.connector.store.connector import SavedPool, StoreConnector, open_connector
from baton.kv_transfer.connector.store.files import BlockFolder, FileStore
from baton.kv_transfer.connector.store.host_memory import HostMemoryStore, StagingArena
from baton.types import BlockHash, InstanceId, RequestId
from baton_kvstore.server import KVStoreServer

KINDS = ("store", "shared_storage", "offload", "multi")
NUM_BLOCKS = 96
CAPACITY = 64
"""Blocks that each of them may hold."""
LIMITS = StoreLimits(cooldown_s=60.0, load_timeout_s=WAIT_S, save_timeout_s=WAIT_S)


class Engine(Woken):
    """A pool, what reads and fills it, and a connector of one kind with all that it needs."""

    def __init__(
        self, host: Host, kind: str, folder: Path, *, fingerprint: Fingerprint = KIND, capacity: int = CAPACITY
    ) -> None:
        super().__init__()
        self.host, self.folder, self.fingerprint, self.capacity = host, folder, fingerprint, capacity
        self.stack = ExitStack()
        specs = shard_specs(fingerprint.tp_size, fingerprint.pp_size)
        layouts = [shard_layout(fingerprint.geometry, spec, fingerprint.block_size) for spec in specs]
        self.pool = KVShards([HostArena(NUM_BLOCKS, layout.block_bytes) for layout in layouts])
        self.stack.callback(self.pool.close)
        self.arena = self.pool.primary
        self.server = BlockServer(self.pool, fingerprint, InstanceId("me"))
        self.stack.callback(self.server.close)
        self.fetcher = BlockFetcher(self.pool, fingerprint)
        self.stack.callback(self.fetcher.close)
        self.parts: list[StoreConnector] = []
        self.connector = self.make(kind)

    def make(self, kind: str) -> KVConnector:
        if kind == "multi":
            return MultiConnector([self.make(each) for each in ("offload", "shared_storage", "store")])
        made = getattr(self, kind)()
        self.parts.append(made)
        return made  # type: ignore[no-any-return]

    def common(self) -> dict[str, Any]:
        pool = SavedPool(self.arena, self.fingerprint.block_size, lambda: self.server.source)
        return {"pool": pool, "loop": self.host.loop, "wake": self.news.set, "follows_all": True}

    def local(self, backend: StoreBackend) -> StoreConnector:
        return StoreConnector(backend, LIMITS, use=StoreUse(), **self.common())

    def store(self) -> StoreConnector:
        async def start() -> KVStoreServer:
            server = KVStoreServer(KVStoreConfig(capacity_bytes=self.capacity * self.fingerprint.block_bytes))
            await server.start()
            return server

        server = self.host.run(start())
        self.stack.callback(lambda: self.host.run(server.stop()))
        options = StoreOptions(server.address, cooldown_s=60.0, load_timeout_s=WAIT_S, save_timeout_s=WAIT_S)
        return open_connector(options, fingerprint=self.fingerprint, fetcher=self.fetcher, **self.common())

    def shared_storage(self) -> StoreConnector:
        whole = self.fingerprint.undivided()
        files = BlockFolder(self.folder, whole, max_bytes=self.capacity * (whole.block_bytes + 1024), sync=False)
        return self.local(FileStore(files, self.pool, self.fingerprint, threads=3, blocks_per_call=4))

    def offload(self) -> StoreConnector:
        return self.local(HostMemoryStore(StagingArena(self.pool, self.fingerprint, self.capacity)))

    def save(self, request: LoadRequest, chunks: Sequence[int] = (10_000,), first: int = 0) -> None:
        """Compute a prompt in chunks and end it; afterwards its blocks belong to others, who write into them."""
        ids = blocks_of(request, first)
        for i, name in enumerate(request.hashes):
            self.fill(ids[i], name)
        for end in chunks:
            tokens = min(end, len(request.token_ids))
            self.connector.blocks_computed(request.request_id, ids, request.hashes[: tokens // BS], tokens)
        self.finish(request.request_id)
        self.reuse(first, first + len(ids))

    def finish(self, request_id: RequestId) -> None:
        if self.connector.request_finished(request_id):
            assert self.connector.has_pending()
            assert self.wait(self.connector.poll_releases) == [request_id]
        assert not self.connector.poll_releases()

    def reuse(self, first: int, stop: int) -> None:
        self.arena.generations[first:stop] += np.uint64(1)
        for arena in self.pool.arenas:
            arena.blocks[first:stop] = 255

    def start(self, request: LoadRequest, local: int = 0, first: int = 48) -> bool:
        plan = self.connector.plan_load(request, local)
        if plan is None:
            return False
        self.connector.start_load(request, local, blocks_of(request, first))
        return True

    def load(self, request: LoadRequest, local: int = 0, first: int = 48) -> int:
        """Return how many leading tokens are there in the end; each is checked."""
        if not self.start(request, local, first):
            return local
        (update,) = self.wait(self.connector.poll_loads)
        assert update.error is None
        self.check(request, update, local, first)
        return update.num_valid_tokens

    def check(self, request: LoadRequest, update: LoadUpdate, local: int, first: int) -> None:
        assert local <= update.num_valid_tokens < len(request.token_ids)
        assert update.stats.transferred_tokens == update.num_valid_tokens - local
        for i in range(local // BS, update.num_valid_tokens // BS):
            assert self.holds(first + i, request.hashes[i])

    def fill(self, block: int, name: BlockHash) -> None:
        self.arena.blocks[block] = content(name)

    def holds(self, block: int, name: BlockHash) -> bool:
        return np.array_equal(self.arena.blocks[block], content(name))

    def close(self) -> None:
        self.connector.close()
        for part in self.parts:
            self.host.run(part.aclose())
        self.stack.close()


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, host: Host, tmp_path: Path) -> Iterator[Engine]:
    made = Engine(host, request.param, tmp_path / "kv")
    yield made
    made.close()


@pytest.mark.parametrize("length", [BS + 1, 100, 6 * BS, 6 * BS + 1])
def test_what_was_saved_is_loaded_though_the_pool_has_forgotten_it(engine: Engine, length: int) -> None:
    request = prompt(length)
    engine.save(request, chunks=(40, 70, 10_000))
    assert engine.load(prompt(length, "again")) == (length - 1) // BS * BS
    assert not engine.arena.blocks[48 + (length - 1) // BS].any()
    assert not engine.connector.has_pending()


def test_blocks_found_locally_are_not_written(engine: Engine) -> None:
    request = prompt(6 * BS + 3)
    engine.save(request)
    engine.arena.blocks[48:50] = 7
    assert engine.load(prompt(6 * BS + 3, "again"), local=2 * BS) == 6 * BS
    assert (engine.arena.blocks[48:50] == 7).all()


def test_only_a_beginning_may_be_there_or_nothing(engine: Engine) -> None:
    engine.save(prompt(4 * BS))
    assert engine.load(prompt(10 * BS, "long")) == 4 * BS
    assert engine.load(prompt(10 * BS, "other", seed=1), local=2 * BS) == 2 * BS
    assert not engine.connector.has_pending()


def test_the_last_token_is_left_to_compute_and_scored_prompts_are_not_loaded(engine: Engine) -> None:
    engine.save(prompt(3 * BS))
    assert engine.connector.plan_load(prompt(BS, "one"), 0) is None
    assert engine.connector.plan_load(prompt(3 * BS, "scored", prompt_logprobs=1), 0) is None
    assert engine.connector.plan_load(prompt(3 * BS, "odd"), 5) is None  # not at a block's edge
    assert engine.load(prompt(3 * BS, "again")) == 2 * BS


def test_a_block_reused_before_it_was_copied_is_not_kept(engine: Engine) -> None:
    request = prompt(4 * BS)
    ids = blocks_of(request, 0)
    for i, name in enumerate(request.hashes):
        engine.fill(ids[i], name)
    gate = host_gate(engine.host)
    engine.connector.blocks_computed(request.request_id, ids, request.hashes, 4 * BS)
    engine.reuse(1, 2)
    gate.set()
    engine.finish(request.request_id)
    assert engine.load(prompt(10 * BS, "again")) == BS


def test_what_was_generated_is_saved_with_the_end_of_its_request(engine: Engine) -> None:
    assert engine.connector.follows_all
    request = prompt(6 * BS)
    ids = blocks_of(request, 0)
    for i, name in enumerate(request.hashes):
        engine.fill(ids[i], name)
    engine.connector.blocks_computed(request.request_id, ids[:3], request.hashes[:2], 40)
    engine.connector.blocks_computed(request.request_id, ids, request.hashes, 6 * BS)
    engine.finish(request.request_id)
    engine.reuse(0, 6)
    assert engine.load(prompt(10 * BS, "turn 2")) == 6 * BS


@pytest.mark.parametrize("wait_for_start", [False, True])
def test_a_cancelled_load_reports_once_and_nobody_writes_afterwards(engine: Engine, wait_for_start: bool) -> None:
    request = prompt(8 * BS + 1)
    engine.save(request)
    assert engine.start(prompt(8 * BS + 1, "again"))
    if wait_for_start:
        engine.host.run(asyncio.sleep(0.001))
    engine.connector.cancel_load(RequestId("again"))
    (update,) = engine.wait(engine.connector.poll_loads)
    engine.check(request, update, 0, 48)
    engine.arena.blocks[48:60] = 3
    engine.connector.cancel_load(RequestId("again"))
    engine.host.run(asyncio.sleep(0.01))
    assert engine.connector.poll_loads() == []
    assert (engine.arena.blocks[48:60] == 3).all()
    assert not engine.connector.has_pending()


def test_closing_ends_loads_and_gives_every_block_back(engine: Engine) -> None:
    saved, load, save = prompt(8 * BS + 1, "saved"), prompt(8 * BS + 1, "load"), prompt(8 * BS, "save", seed=3)
    engine.save(saved)
    gate = host_gate(engine.host)
    assert engine.start(load)
    engine.connector.blocks_computed(save.request_id, blocks_of(save, 0), save.hashes, 8 * BS)
    assert engine.connector.request_finished(save.request_id)
    engine.connector.close()
    gate.set()
    assert engine.wait(engine.connector.poll_releases) == [save.request_id]
    (update,) = engine.wait(engine.connector.poll_loads)
    assert update.error == "cancelled"
    assert not engine.connector.has_pending()
    assert engine.connector.plan_load(load, 0) is None
    engine.connector.blocks_computed(RequestId("late"), blocks_of(save, 0), save.hashes, 8 * BS)
    assert not engine.connector.request_finished(RequestId("late"))


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happens_what_is_reported_valid_is_right(host: Host, kind: str, tmp_path: Path) -> None:
    """Far too little room, prompts that share beginnings, loads that are cancelled, blocks that are reused."""
    draw, hits = np.random.default_rng(7), 0
    engine = Engine(host, kind, tmp_path / "kv", capacity=9)
    try:
        for turn in range(40):
            requests = [
                prompt(int(draw.integers(1, 8)) * BS + 1, f"{turn}-{i}", seed=int(draw.integers(3))) for i in range(4)
            ]
            started = {}
            for i, request in enumerate(requests[:3]):
                if engine.start(request, 0, 32 + 8 * i):
                    started[request.request_id] = (request, 32 + 8 * i)
            cancelled = requests[int(draw.integers(3))].request_id if draw.random() < 0.3 else None
            if cancelled is not None:
                engine.connector.cancel_load(cancelled)
            engine.save(requests[3], chunks=(32, 10_000))
            while started:
                for update in engine.wait(engine.connector.poll_loads):
                    request, first = started.pop(update.request_id)
                    assert update.error is None or update.request_id == cancelled
                    engine.check(request, update, 0, first)
                    hits += update.num_valid_tokens // BS
        assert not engine.connector.has_pending()
        assert hits > 40
    finally:
        engine.close()


# --- shapes ---


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_divided_pool_gets_back_what_it_had(host: Host, kind: str, dtype: str, tmp_path: Path) -> None:
    heads = KVLayout((LayerShape(2, 16, 16),) * 2, BS, dtype)
    halves = dataclasses.replace(Fingerprint.of(model="tiny", model_digest="d1", rope="", layout=heads), tp_size=2)
    engine = Engine(host, kind, tmp_path / "kv", fingerprint=halves)
    try:
        request = prompt(5 * BS + 1)
        ids = blocks_of(request, 0)
        draw = np.random.default_rng(3)
        for arena in engine.pool.arenas:
            arena.blocks[:5] = draw.integers(0, 256, arena.blocks[:5].shape, np.uint8)
        before = [arena.blocks[:5].copy() for arena in engine.pool.arenas]
        engine.connector.blocks_computed(request.request_id, ids, request.hashes, 5 * BS)
        engine.finish(request.request_id)
        engine.reuse(0, 6)
        assert engine.start(prompt(5 * BS + 1, "again"))
        (update,) = engine.wait(engine.connector.poll_loads)
        assert update.num_valid_tokens == 5 * BS
        for arena, blocks in zip(engine.pool.arenas, before, strict=True):
            assert np.array_equal(arena.blocks[48:53], blocks)
    finally:
        engine.close()


# --- several at once ---


class Faulty(KVConnector):
    """Fails in whatever it is asked, or only in what it is told to fail in."""

    follows_all = True

    def __getattribute__(self, name: str) -> Any:
        if name in ("follows_all", "__class__", "__dict__") or name.startswith("_"):
            return object.__getattribute__(self, name)

        def fail(*_: object) -> None:
            raise OSError(f"{name} does not work")

        return fail


class Holder(KVConnector):
    """Keeps blocks until it is told to let go."""

    def __init__(self) -> None:
        self.let_go: list[RequestId] = []

    def request_finished(self, request_id: RequestId) -> bool:
        return True

    def poll_releases(self) -> list[RequestId]:
        released, self.let_go = self.let_go, []
        return released


@pytest.mark.parametrize("at", [0, 1, 2])
def test_one_that_fails_stops_no_other(host: Host, tmp_path: Path, at: int) -> None:
    engine = Engine(host, "offload", tmp_path / "kv")
    try:
        connectors = [engine.connector, engine.make("shared_storage")]
        connectors.insert(at, Faulty())
        engine.connector = MultiConnector(connectors)
        engine.save(prompt(6 * BS + 1), chunks=(40, 10_000))
        assert engine.load(prompt(6 * BS + 1, "again")) == 6 * BS
        assert [part.use.saved_blocks for part in engine.parts] == [6, 6]
        assert [part.use.loaded_tokens for part in engine.parts] == [6 * BS, 0]
        assert engine.connector.poll_releases() == []
    finally:
        engine.close()


def test_the_first_that_has_something_loads_and_the_next_goes_on(host: Host, tmp_path: Path) -> None:
    engine = Engine(host, "offload", tmp_path / "kv", capacity=4)
    try:
        offload = engine.connector
        engine.capacity = CAPACITY
        files = engine.make("shared_storage")
        engine.connector = MultiConnector([offload, files])
        engine.save(prompt(9 * BS))  # the memory has room for the first four
        assert engine.load(prompt(9 * BS, "again")) == 8 * BS
        assert [part.use.loaded_tokens for part in engine.parts] == [4 * BS, 4 * BS]
        assert engine.load(prompt(4 * BS + 1, "short")) == 4 * BS
        assert [part.use.loads for part in engine.parts] == [2, 1]
    finally:
        engine.close()


def test_blocks_are_given_back_once_when_the_last_of_several_has_let_go(host: Host, tmp_path: Path) -> None:
    engine = Engine(host, "multi", tmp_path / "kv")
    try:
        holders = [Holder(), Holder()]
        multi = engine.connector = MultiConnector([holders[0], engine.connector, holders[1]])
        request = prompt(4 * BS)
        gate = host_gate(host)
        multi.blocks_computed(request.request_id, blocks_of(request, 0), request.hashes, 4 * BS)
        assert multi.request_finished(request.request_id)
        holders[1].let_go.append(request.request_id)
        assert multi.poll_releases() == []
        gate.set()
        saved = [part.use for part in engine.parts]
        engine.wait(lambda: multi.poll_releases() or all(use.saves for use in saved))
        assert multi.poll_releases() == []
        assert multi.has_pending()
        holders[0].let_go.append(request.request_id)
        assert engine.wait(multi.poll_releases) == [request.request_id]
        assert not multi.has_pending()
        holders[0].let_go.append(request.request_id)
        assert multi.poll_releases() == []
    finally:
        engine.close()


def test_a_file_system_that_hangs_costs_a_load_its_time_and_touches_nothing_afterwards(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(host, "shared_storage", tmp_path / "kv")
    free = threading.Event()
    try:
        engine.save(prompt(6 * BS + 1))
        read = BlockFolder.read

        def hang(self: BlockFolder, *arguments: Any) -> bool:
            assert free.wait(WAIT_S)
            return read(self, *arguments)

        monkeypatch.setattr(BlockFolder, "read", hang)
        (part,) = engine.parts
        part._limits = dataclasses.replace(LIMITS, load_timeout_s=0.1)
        assert engine.start(prompt(6 * BS + 1, "again"))
        (update,) = engine.wait(engine.connector.poll_loads)
        assert (update.num_valid_tokens, update.stats.local_reason) == (0, "store_failed")
        assert update.error is not None
        engine.arena.blocks[48:60] = 3
        free.set()
        part._limits = LIMITS
        deadline = time.monotonic() + WAIT_S
        while part._backend._running:  # type: ignore[attr-defined]
            assert time.monotonic() < deadline
        assert (engine.arena.blocks[48:60] == 3).all()
        assert engine.load(prompt(6 * BS + 1, "once more")) == 6 * BS
    finally:
        free.set()
        engine.close()
