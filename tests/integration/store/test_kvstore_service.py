"""A real store: gRPC control, real arenas, bytes over real pipes."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from baton.api.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc
from baton.errors import BatonError, ConfigError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.blocks import BlockFetcher, BlockServer, LinkOptions, SequenceBlocks
from baton.kv_transfer.types import source_from_pb, source_to_pb
from baton.rpc.channel import check_health, open_channel
from baton.rpc.convert import fingerprint_to_pb
from baton.rpc.errors import from_rpc_error
from baton.rpc.server import free_port
from baton.rpc.service_token import Token
from baton.types import InstanceId
from baton_kvstore.config import KVStoreConfig
from baton_kvstore.main import main
from baton_kvstore.server import KVStoreServer

LAYOUT = KVLayout((LayerShape(2, 32, 32), LayerShape(2, 32, 32)), 16, "float32")
KIND = Fingerprint.of(model="tiny", model_digest="d1", rope="", layout=LAYOUT)
BLOCK = KIND.block_bytes
WAIT_S = 240.0


def names(*labels: object) -> list[bytes]:
    return [hashlib.sha256(str(label).encode()).digest() for label in labels]


class Instance:
    """An instance's pool with a stub of the store."""

    def __init__(
        self, address: str, kind: Fingerprint = KIND, *, pipes: Sequence[str] = ("shm", "tcp"), token: Any = None
    ):
        self.kind = kind
        self.arena = HostArena(32, kind.block_bytes)
        self.server = BlockServer(self.arena, kind, InstanceId("prefill-0"), kinds=pipes, token=token)
        self.fetcher = BlockFetcher(self.arena, kind, kinds=pipes, links=LinkOptions(token=token))
        self.channel = open_channel(address, token=token)
        self.stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(self.channel)

    def fill(self, hashes: Sequence[bytes], first: int = 0) -> None:
        for i, name in enumerate(hashes):
            self.arena.blocks[first + i] = np.resize(np.frombuffer(name, np.uint8), BLOCK)

    def put_request(self, hashes: Sequence[bytes], first: int = 0, **changes: Any) -> kvstore_pb2.PutRequest:
        ids = list(range(first, first + len(hashes)))
        values: dict[str, Any] = {
            "fingerprint": fingerprint_to_pb(self.kind),
            "block_hashes": hashes,
            "source": source_to_pb(self.server.source),
            "block_ids": ids,
            "generations": self.arena.generations[ids].tolist(),
        }
        return kvstore_pb2.PutRequest(**{**values, **changes})

    async def put(self, *labels: object, first: int = 0) -> list[bool]:
        hashes = names(*labels)
        self.fill(hashes, first)
        return list((await self.stub.Put(self.put_request(hashes, first), timeout=WAIT_S)).stored)

    async def get(self, *labels: object, lease_ms: int = 0) -> kvstore_pb2.GetResponse:
        request = kvstore_pb2.GetRequest(
            fingerprint=fingerprint_to_pb(self.kind), block_hashes=names(*labels), lease_ms=lease_ms
        )
        response: kvstore_pb2.GetResponse = await self.stub.Get(request, timeout=WAIT_S)
        return response

    async def fetch(self, answer: kvstore_pb2.GetResponse, first: int = 16) -> Any:
        ids = list(range(first, first + len(answer.block_ids)))
        source = source_from_pb(answer.source)
        return await self.fetcher.fetch_async(
            source,
            SequenceBlocks.pairs(list(answer.block_ids), list(answer.generations), ids),
            deadline=time.monotonic() + WAIT_S,
        )

    def holds(self, hashes: Sequence[bytes], first: int = 16) -> bool:
        blocks = self.arena.blocks[first : first + len(hashes), :32]
        return [bytes(block) for block in blocks] == list(hashes)

    async def close(self) -> None:
        await self.channel.close(None)
        self.server.close()
        self.fetcher.close()
        self.arena.close()


@asynccontextmanager
async def store(**options: Any) -> AsyncIterator[KVStoreServer]:
    server = KVStoreServer(KVStoreConfig(**{"capacity_bytes": 8 * BLOCK, **options}))
    await server.start()
    try:
        yield server
        server.store.check()
    finally:
        await server.stop()
        assert server.store.used_bytes == 0


@asynccontextmanager
async def connected(server: KVStoreServer, kind: Fingerprint = KIND, **options: Any) -> AsyncIterator[Instance]:
    instance = Instance(server.address, kind, **options)
    try:
        yield instance
    finally:
        await instance.close()


@contextmanager
def refused(code: str, field: str | None = None) -> Iterator[None]:
    with pytest.raises((grpc.aio.AioRpcError, BatonError)) as caught:
        yield
    error = as_baton(caught.value)
    assert (error.code, error.field) == (code, field), error


def as_baton(error: BaseException) -> BatonError:
    return error if isinstance(error, BatonError) else from_rpc_error(error)  # type: ignore[arg-type]


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.002)


@contextmanager
def silent_listener() -> Iterator[common_pb2.KvEndpoint]:
    """A pipe that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield common_pb2.KvEndpoint(kind="tcp", address=f"127.0.0.1:{listener.getsockname()[1]}")


@pytest.mark.parametrize("pipe", ["shm", "tcp"])
async def test_bytes_come_back_as_they_went(pipe: str) -> None:
    async with store(pipes=(pipe,)) as server, connected(server, pipes=(pipe,)) as instance:
        response = await instance.stub.Put(instance.put_request(names(*range(5))), timeout=WAIT_S)
        assert (list(response.stored), response.bytes) == ([True] * 5, 5 * BLOCK)
        instance.fill(names("other"), 0)
        await instance.put(*"abc")
        answer = await instance.get("a", "b", "c", "missing")
        assert len(answer.block_ids) == 3
        assert answer.lease_ms == 10_000
        result = await instance.fetch(answer)
        assert result.pipe_kind == pipe
        assert result.valid.all()
        assert instance.holds(names(*"abc"))
        released = await instance.stub.Release(kvstore_pb2.ReleaseRequest(lease_id=answer.lease_id), timeout=WAIT_S)
        assert released.found
        assert server.store.stats().num_leases == 0


async def test_a_second_put_moves_no_bytes() -> None:
    async with store() as server, connected(server) as instance:
        assert await instance.put(1, 2) == [True, True]
        again = await instance.stub.Put(instance.put_request(names(1, 2, 3)), timeout=WAIT_S)
        assert (list(again.stored), again.bytes) == ([True] * 3, BLOCK)


async def test_blocks_that_changed_at_their_source_are_not_stored() -> None:
    async with store() as server, connected(server) as instance:
        request = instance.put_request(names(1, 2, 3))
        instance.arena.generations[1] += np.uint64(1)
        response = await instance.stub.Put(request, timeout=WAIT_S)
        assert list(response.stored) == [True, False, True]
        assert server.store.used_bytes == 2 * BLOCK
        assert len((await instance.get(1, 2, 3)).block_ids) == 1


async def test_eviction_fences_late_readers() -> None:
    async with store() as server, connected(server) as instance:
        await instance.put(*range(8))
        answer = await instance.get(*range(8), lease_ms=1)
        await eventually(lambda: not server.store.expire() and not len(server.store.leases))
        await instance.put(*"abc")  # the chain's last three blocks have to go
        result = await instance.fetch(answer)
        assert result.valid.tolist() == [True] * 5 + [False] * 3
        assert server.store.stats().evictions == 3


async def test_a_store_whose_blocks_are_all_leased_says_so() -> None:
    async with store() as server, connected(server) as instance:
        await instance.put(*range(8))
        answer = await instance.get(*range(8))
        with refused("queue_full"):
            await instance.put("new")
        await instance.stub.Release(kvstore_pb2.ReleaseRequest(lease_id=answer.lease_id), timeout=WAIT_S)
        assert await instance.put("new") == [True]


async def test_leases_are_bounded() -> None:
    async with store(max_leases=2) as server, connected(server) as instance:
        await instance.put(1)
        await instance.get(1)
        await instance.get(1)
        with refused("queue_full"):
            await instance.get(1)


async def test_a_get_that_fails_keeps_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store() as server, connected(server) as instance:
        await instance.put("a")

        def nowhere(pool: Any) -> Any:
            raise ConfigError("no pipe can listen", field="pipes")

        monkeypatch.setattr(server._lanes, "source", nowhere)
        with refused("config", "pipes"):
            await instance.get("a")
        assert not len(server.store.leases)


async def test_leases_end_by_themselves_and_are_capped() -> None:
    async with store(default_lease_s=0.05, max_lease_s=0.1) as server, connected(server) as instance:
        await instance.put(1)
        assert (await instance.get(1)).lease_ms == 50
        assert (await instance.get(1, lease_ms=100_000)).lease_ms == 100
        await eventually(lambda: not len(server.store.leases))  # the store's own clock does it, nobody calls
        released = await instance.stub.Release(kvstore_pb2.ReleaseRequest(lease_id=7), timeout=WAIT_S)
        assert not released.found


async def test_contains_delete_and_info() -> None:
    async with store(instance_id="kv-7") as server, connected(server) as instance:
        await instance.put(1, 2, 3)
        kind = fingerprint_to_pb(KIND)
        there = await instance.stub.Contains(
            kvstore_pb2.ContainsRequest(fingerprint=kind, block_hashes=names(1, 2, 9)), timeout=WAIT_S
        )
        assert there.num_blocks == 2
        gone = await instance.stub.Delete(
            kvstore_pb2.DeleteRequest(fingerprint=kind, block_hashes=names(2, 9)), timeout=WAIT_S
        )
        assert gone.num_deleted == 1
        await instance.get(1, 2)
        info = await instance.stub.GetStoreInfo(kvstore_pb2.GetStoreInfoRequest(), timeout=WAIT_S)
        assert (info.instance_id, info.capacity_bytes, info.used_bytes) == ("kv-7", 8 * BLOCK, 2 * BLOCK)
        assert (info.num_blocks, info.num_hits, info.num_misses, info.num_leases) == (2, 1, 1, 1)
        await instance.stub.Delete(kvstore_pb2.DeleteRequest(fingerprint=kind, all=True), timeout=WAIT_S)
        assert (await instance.get(1)).lease_id == 0


@pytest.mark.parametrize("behind", ["memory", "disk", "object"])
async def test_a_deletion_may_name_a_block_twice(behind: str, tmp_path: Path) -> None:
    options = {
        "memory": {},
        "disk": {"disk_path": str(tmp_path / "kv"), "disk_write": "all"},
        "object": {"object_url": f"file://{tmp_path}/objects", "object_write": "all"},
    }[behind]
    async with store(**options) as server, connected(server) as instance:
        await instance.put(1, 2, 3)
        await eventually(lambda: all(tier.stats().num_blocks == 3 for tier in server.tiers.chain.tiers))
        request = kvstore_pb2.DeleteRequest(fingerprint=fingerprint_to_pb(KIND), block_hashes=names(1, 1, 2, 9, 9, 1))
        assert (await instance.stub.Delete(request, timeout=WAIT_S)).num_deleted == 2
        assert (await instance.get(1)).lease_id == 0
        assert len((await instance.get(3)).block_ids) == 1
        assert await instance.put(1, 2, 3) == [True] * 3


async def test_other_kinds_of_kv_are_apart_and_share_the_budget() -> None:
    other = replace(KIND, model_digest="d2")
    async with store(max_fingerprints=2) as server, connected(server) as a, connected(server, other) as b:
        await a.put(*range(6))
        assert (await b.get(0)).lease_id == 0
        assert await b.put(*range(4)) == [True] * 4
        assert len((await b.get(*range(4))).block_ids) == 4
        assert len((await a.get(*range(6))).block_ids) == 4
        third = replace(KIND, model_digest="d3")
        async with connected(server, third) as c:
            with refused("queue_full"):  # both others are leased
                await c.put(1)


async def test_an_unused_kind_makes_room_for_a_new_one() -> None:
    async with store(max_fingerprints=1) as server, connected(server) as a:
        await a.put(1)
        answer = await a.get(1)
        await a.stub.Release(kvstore_pb2.ReleaseRequest(lease_id=answer.lease_id), timeout=WAIT_S)
        async with connected(server, replace(KIND, model_digest="d2")) as b:
            assert await b.put(1) == [True]
        assert (await a.get(1)).lease_id == 0
        assert await a.put(2) == [True]


async def test_a_source_that_is_gone_costs_nothing() -> None:
    async with store() as server, connected(server) as instance:
        source = source_to_pb(instance.server.source)
        del source.endpoints[:]
        source.endpoints.add(kind="tcp", address="127.0.0.1:1")
        with refused("pipe_closed"):
            await instance.stub.Put(instance.put_request(names(1), source=source), timeout=WAIT_S)
        assert server.store.used_bytes == 0


async def test_a_put_that_is_cancelled_or_too_late_gives_its_slots_back() -> None:
    async with store() as server, connected(server) as instance:
        with silent_listener() as endpoint:
            source = source_to_pb(instance.server.source)
            del source.endpoints[:]
            source.endpoints.append(endpoint)
            request = instance.put_request(names(1, 2), source=source)
            call = instance.stub.Put(request, timeout=WAIT_S)
            await eventually(lambda: server.store.used_bytes > 0)
            assert (await instance.get(1)).lease_id == 0  # half a block is never found
            call.cancel()
            await eventually(lambda: server.store.used_bytes == 0)
            with refused("deadline_exceeded"):
                await instance.stub.Put(request, timeout=0.2)
            await eventually(lambda: server.store.used_bytes == 0)


async def test_waiting_puts_are_bounded() -> None:
    options = {"pull_workers": 1, "max_pending_puts": 2, "pull_timeout_s": 1.5}
    async with store(**options) as server, connected(server) as instance:
        with silent_listener() as endpoint:
            source = source_to_pb(instance.server.source)
            del source.endpoints[:]
            source.endpoints.append(endpoint)
            calls = [instance.stub.Put(instance.put_request(names(i), source=source), timeout=WAIT_S) for i in range(3)]
            codes = []
            for call in calls:
                with pytest.raises((grpc.aio.AioRpcError, BatonError)) as caught:
                    await call
                codes.append(as_baton(caught.value).code)
        assert sorted(codes) == ["deadline_exceeded", "deadline_exceeded", "queue_full"]
        assert await instance.put("later") == [True]


async def test_bad_requests_name_their_field() -> None:
    async with store(max_blocks_per_call=4) as server, connected(server) as instance:
        put, kind = instance.put_request, fingerprint_to_pb(KIND)
        endless = source_to_pb(instance.server.source)
        del endless.endpoints[:]
        bad_epoch = source_to_pb(instance.server.source)
        bad_epoch.epoch = b"short"
        big = fingerprint_to_pb(replace(KIND, block_bytes=9 * BLOCK))
        big_source = source_to_pb(replace(instance.server.source, fingerprint=replace(KIND, block_bytes=9 * BLOCK)))
        other = fingerprint_to_pb(replace(KIND, model_digest="d2"))
        cases: list[tuple[str, str, str, Any]] = [
            ("Put", "invalid_request", "block_hashes", put(names(*range(5)))),
            ("Put", "invalid_request", "block_hashes", put([])),
            ("Put", "invalid_request", "block_hashes[1]", put([*names(1), b"short"])),
            ("Put", "invalid_request", "block_hashes", put(names(1, 1))),
            ("Put", "invalid_request", "block_ids", put(names(1), block_ids=[1, 2])),
            ("Put", "invalid_request", "generations", put(names(1), generations=[])),
            ("Put", "invalid_request", "block_ids[0]", put(names(1), block_ids=[32])),
            ("Put", "invalid_request", "source.endpoints", put(names(1), source=endless)),
            ("Put", "invalid_request", "source.epoch", put(names(1), source=bad_epoch)),
            ("Put", "invalid_request", "fingerprint", put(names(1), fingerprint=None)),
            ("Put", "invalid_request", "fingerprint.block_bytes", put(names(1), fingerprint=big, source=big_source)),
            ("Put", "fingerprint_mismatch", "model_digest", put(names(1), fingerprint=other)),
            ("Get", "invalid_request", "fingerprint", kvstore_pb2.GetRequest(block_hashes=names(1))),
            ("Get", "invalid_request", "block_hashes", kvstore_pb2.GetRequest(fingerprint=kind)),
            ("Contains", "invalid_request", "block_hashes", kvstore_pb2.ContainsRequest(fingerprint=kind)),
            ("Delete", "invalid_request", "block_hashes", kvstore_pb2.DeleteRequest(fingerprint=kind)),
            (
                "Delete",
                "invalid_request",
                "all",
                kvstore_pb2.DeleteRequest(fingerprint=kind, block_hashes=names(1), all=True),
            ),
        ]
        for method, code, field, request in cases:
            with refused(code, field):
                await getattr(instance.stub, method)(request, timeout=WAIT_S)
        assert server.store.used_bytes == 0


async def test_the_token_guards_control_and_data(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("secret, of the services\n")
    async with store(token_file=str(secret)) as server:
        async with connected(server, token=Token("secret, of the services")) as instance:
            assert await instance.put(1) == [True]
            assert (await instance.fetch(await instance.get(1))).valid.all()
        async with connected(server, token=Token("wrong")) as instance:
            with refused("unauthenticated", "token"):
                await instance.put(2)


async def test_metrics_tell_what_happened() -> None:
    port = free_port()
    async with store(metrics_port=port) as server, connected(server) as instance:
        await instance.put(1, 2)
        await instance.get(1, 2, 3)
        with refused("invalid_request", "block_hashes"):
            await instance.put()
        text = await asyncio.to_thread(_scrape, port)
        for line in (
            "baton_kvstore_hits_total 2.0",
            "baton_kvstore_misses_total 1.0",
            "baton_kvstore_leases 1.0",
            f"baton_kvstore_used_bytes {2.0 * BLOCK}",
            f'baton_kvstore_pulled_bytes_total{{pipe="shm"}} {2.0 * BLOCK}',
            'baton_kvstore_calls_total{code="ok",method="Put"} 1.0',
            'baton_kvstore_calls_total{code="invalid_request",method="Put"} 1.0',
            'baton_kvstore_call_seconds_count{method="Get"} 1.0',
        ):
            assert line in text, line
        with pytest.raises(ConfigError) as caught:
            await KVStoreServer(KVStoreConfig(metrics_port=port)).start()
        assert caught.value.field == "metrics_port"


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as response:
        return str(response.read().decode())


def test_the_process_serves_without_torch_and_ends_on_sigterm() -> None:
    port = free_port()
    script = (
        "import sys\nfrom baton_kvstore.main import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'baton.engine'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else code)\n"
    )
    argv = [sys.executable, "-c", script, "--port", str(port), "--capacity-bytes", "1000000"]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    try:
        assert asyncio.run(_serving(f"127.0.0.1:{port}"))
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, log
    assert f"listening on 127.0.0.1:{port}" in log


async def _serving(address: str) -> bool:
    async with asyncio.timeout(WAIT_S):
        while not await check_health(address):
            await asyncio.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--capacity-bytes", "0"], "capacity_bytes"),
        (["--pipes", "pigeon"], "pigeon"),
        (["--host", "0.0.0.0"], "--token-file"),
        (["--token-file", "/nowhere"], "/nowhere"),
        (["--default-lease-s", "61"], "default_lease_s"),
        (["--metrics-port", "70000"], "metrics_port"),
    ],
)
def test_a_configuration_that_cannot_work_ends_with_one_line(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_a_port_in_use_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--port", str(taken.getsockname()[1])]) == 2
    assert "in use" in capsys.readouterr().err.splitlines()[-1]


# On disk


async def test_a_durable_put_and_a_deletion_outlive_kills_of_the_process(tmp_path: Path) -> None:
    port = free_port()
    argv = [sys.executable, "-m", "baton_kvstore.main", "--port", str(port), "--capacity-bytes", str(6 * BLOCK)]
    argv += ["--disk-path", str(tmp_path / "kv"), "--disk-bytes", "8000000"]
    there: list[int] = []
    for first in (0, 100, 200):
        process = await asyncio.to_thread(subprocess.Popen, argv, stderr=subprocess.DEVNULL)
        try:
            assert await _serving(f"127.0.0.1:{port}")
            instance = Instance(f"127.0.0.1:{port}")
            for label in there:
                answer = await instance.get(label)
                assert len(answer.block_ids) == 1, label
                assert (await instance.fetch(answer)).valid.all()
                assert instance.holds(names(label))
                released = kvstore_pb2.ReleaseRequest(lease_id=answer.lease_id)
                await instance.stub.Release(released, timeout=WAIT_S)
            assert (await instance.get(first - 50)).lease_id == 0
            hashes = names(*range(first, first + 12))
            instance.fill(hashes)
            response = await instance.stub.Put(instance.put_request(hashes, durable=True), timeout=WAIT_S)
            assert list(response.durable) == [True] * 12
            there += range(first, first + 12)
            await instance.put(first + 50)
            request = kvstore_pb2.DeleteRequest(fingerprint=fingerprint_to_pb(KIND), block_hashes=names(first + 50))
            assert (await instance.stub.Delete(request, timeout=WAIT_S)).num_deleted == 1
            load = [asyncio.ensure_future(instance.put(first + 60 + i)) for i in range(8)]
            await asyncio.wait(load, return_when=asyncio.FIRST_COMPLETED)
        finally:
            process.kill()
            process.wait()
        await asyncio.wait(load)
        assert load[0].exception() is None or isinstance(load[0].exception(), grpc.aio.AioRpcError)
        for task in load:
            task.exception()
        await instance.close()


async def test_blocks_go_to_disk_before_they_are_evicted_and_come_back(tmp_path: Path) -> None:
    disk = {"disk_path": str(tmp_path / "kv"), "disk_bytes": 8 << 20}
    async with store(**disk) as server, connected(server) as instance:
        for label in range(0, 24, 4):
            assert await instance.put(*range(label, label + 4)) == [True] * 4
        kind = fingerprint_to_pb(KIND)
        request = kvstore_pb2.ContainsRequest(fingerprint=kind, block_hashes=names(*range(24)))
        assert (await instance.stub.Contains(request, timeout=WAIT_S)).num_blocks == 24
        seen = 0
        while seen < 24:
            answer = await instance.get(*range(seen, 24))
            count = len(answer.block_ids)
            assert count
            assert (await instance.fetch(answer)).valid.all()
            assert instance.holds(names(*range(seen, seen + count)))
            await instance.stub.Release(kvstore_pb2.ReleaseRequest(lease_id=answer.lease_id), timeout=WAIT_S)
            seen += count
            assert answer.more == (seen < 24)
        assert server.tiers.counters.promotions > 0
        assert server.store.stats().evictions > 0
        request = kvstore_pb2.DeleteRequest(fingerprint=kind, all=True)
        assert (await instance.stub.Delete(request, timeout=WAIT_S)).num_deleted == 24
        assert (await instance.get(0)).lease_id == 0
    async with store(**disk) as server, connected(server) as instance:
        assert (await instance.get(0)).lease_id == 0


async def test_everything_written_survives_a_restart_and_gets_in_parallel_share_one_read(tmp_path: Path) -> None:
    disk = {"disk_path": str(tmp_path / "kv"), "disk_bytes": 8 << 20, "disk_write": "all"}
    async with store(**disk) as server, connected(server) as instance:
        await instance.put(1, 2, 3)
    async with store(**disk) as server, connected(server) as instance:
        answers = await asyncio.gather(*(instance.get(1, 2, 3) for _ in range(5)))
        assert [len(answer.block_ids) for answer in answers] == [3] * 5
        assert (await instance.fetch(answers[-1])).valid.all()
        assert instance.holds(names(1, 2, 3))
        assert server.tiers.counters.promotions == 3


async def test_a_damaged_file_is_a_miss(tmp_path: Path) -> None:
    disk = {"disk_path": str(tmp_path / "kv"), "disk_bytes": 8 << 20, "disk_write": "all"}
    async with store(**disk) as server, connected(server) as instance:
        await instance.put(1)
    (file,) = (tmp_path / "kv").glob("segment-*")
    with file.open("r+b") as raw:
        raw.seek(2 * 4096 + 7)
        raw.write(b"xyz")
    async with store(**disk) as server, connected(server) as instance:
        assert (await instance.get(1)).lease_id == 0
        assert server.disk is not None
        assert server.disk.counters.checksum_failures == 1
        assert await instance.put(1) == [True]
        assert (await instance.fetch(await instance.get(1))).valid.all()


async def test_many_clients_on_a_small_memory_read_what_they_wrote(tmp_path: Path) -> None:
    disk = {"disk_path": str(tmp_path / "kv"), "disk_bytes": 32 << 20, "disk_sync_s": 0.01}
    async with store(capacity_bytes=20 * BLOCK, **disk) as server:

        async def client(number: int) -> None:
            rng = np.random.default_rng(number)
            async with connected(server, pipes=("shm",)) as instance:
                for step in range(12):
                    mine = [f"{number}/{step}/{i}" for i in range(3)]
                    assert await instance.put(*mine) == [True] * 3
                    past = int(rng.integers(step + 1))
                    await read_all(instance, [f"{number}/{past}/{i}" for i in range(3)])

        async def read_all(instance: Instance, labels: list[str]) -> None:
            """A miss may be a moment without room: others' leases end, so asking again must bring every block."""
            async with asyncio.timeout(WAIT_S):
                while labels:
                    answer = await instance.get(*labels, lease_ms=round(1000 * WAIT_S))  # however busy this machine is
                    count = len(answer.block_ids)
                    if count:
                        assert (await instance.fetch(answer)).valid.all()
                        assert instance.holds(names(*labels[:count]))
                        request = kvstore_pb2.ReleaseRequest(lease_id=answer.lease_id)
                        await instance.stub.Release(request, timeout=WAIT_S)
                    labels = labels[count:]

        await asyncio.gather(*(client(number) for number in range(4)))
        assert server.tiers.counters.promotions > 0
        assert server.tiers.counters.refused == 0
        server.store.check()


async def test_kinds_of_kv_are_read_at_fixed_ports() -> None:
    first = free_port()
    async with store(kv_port=first, pipes=("tcp",)) as server, connected(server, pipes=("tcp",)) as instance:
        assert await instance.put("a") == [True]
        answer = await instance.get("a")
        assert [x.address.rpartition(":")[2] for x in answer.source.endpoints] == [str(first)]
