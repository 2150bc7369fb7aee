"""A KV store with a disk: what goes there before it is evicted comes back, also after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from tests.support.servers.kvstore_service import BLOCK, KIND, WAIT_S, Instance, connected, store
from tests.support.transport.named_blocks import names
from tests.support.transport.store_check import check_store

from baton.api.v1 import kvstore_pb2
from baton.rpc.convert import fingerprint_to_pb


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
        check_store(server.store)
