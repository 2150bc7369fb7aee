"""The calls of a KV store: whatever is asked, blocks are what was put, and the books add up."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from typing import Any

import numpy as np
from tests.fuzz.choices import Choices
from tests.fuzz.event_loops import KEPT, event_loop
from tests.fuzz.targets.requests import filled
from tests.support.transport.store_check import check_store

from baton.api.v1 import common_pb2, kvstore_pb2
from baton.config.kvstore import KVStoreConfig
from baton.errors import BatonError
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.blocks import BlockServer
from baton.kv_transfer.types import source_to_pb
from baton.rpc.convert import fingerprint_from_pb, fingerprint_to_pb
from baton.types import InstanceId
from baton_kvstore.server import KVStoreServer

_BLOCKS = 8
_LONGEST_S = 5.0


class _Context:
    """Of a call from this host."""

    def time_remaining(self) -> float:
        return _LONGEST_S

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


class _Instance:
    """One whose blocks of a kind of KV are put; block ``i`` is full of ``i + 1``."""

    def __init__(self, model: str, width: int) -> None:
        layout = KVLayout((LayerShape(1, width, width),), 4, "float32")
        self.kind = Fingerprint.of(model=model, model_digest="d", rope="", layout=layout)
        self._arena = HostArena(_BLOCKS, self.kind.block_bytes)
        self._arena.blocks[:] = np.arange(1, _BLOCKS + 1, dtype=np.uint8)[:, None]
        self._server = BlockServer(self._arena, self.kind, InstanceId(model), kinds=["shm"])
        self.source = source_to_pb(self._server.source)


class _Store:
    """A store with room for a few blocks, and the instances that put some."""

    def __init__(self) -> None:
        self.loop = event_loop(__name__)
        self.instances = [_Instance("a", 8), _Instance("b", 16)]
        room = 5 * self.instances[1].kind.block_bytes
        config = KVStoreConfig(capacity_bytes=room, pipes=("shm",), max_fingerprints=3, max_leases=4)
        self.loop.run_until_complete(self._start(config))

    async def _start(self, config: KVStoreConfig) -> None:
        self.server = KVStoreServer(config)
        await self.server.start()
        KEPT.callback(lambda: self.loop.run_until_complete(self.server.stop()))

    async def call(self, name: str, request: Any) -> Any:
        """Return the answer; ``None``: it was refused as documented."""
        try:
            with contextlib.suppress(BatonError):
                return await getattr(self.server._servicer, name)(request, _Context())
        finally:
            check_store(self.server.store)


@functools.cache
def _store() -> _Store:
    return _Store()


def _hash(label: int) -> bytes:
    return hashlib.sha256(bytes([label])).digest()


def _tenant(choices: Choices) -> common_pb2.Tenant | None:
    if choices.number(0, 3):
        return None
    sizes = [0, 1, 400, 2000, 2**63, 2**64 - 1]
    name = choices.pick(["t", "u", "", "\n", "x" * 300])
    return common_pb2.Tenant(id=name, kv_bytes=choices.pick(sizes), kv_disk_bytes=choices.pick(sizes))


def _kind(choices: Choices, right: common_pb2.Fingerprint) -> common_pb2.Fingerprint:
    if choices.number(0, 7):
        return right
    changed = common_pb2.Fingerprint()
    changed.CopyFrom(right)
    filled(choices, changed)
    return changed


def _key(kind: common_pb2.Fingerprint) -> bytes:
    """Return what the store calls a kind; empty: it refuses it."""
    try:
        return fingerprint_from_pb(kind).undivided().digest()
    except BatonError:
        return b""


def kvstore(data: bytes) -> None:
    """Calls of any kind in any order are answered or refused; what a lease shows was put there."""
    store = _store()
    store.loop.run_until_complete(_run(Choices(data), store))


async def _run(choices: Choices, store: _Store) -> None:
    put: dict[tuple[bytes, bytes], set[int]] = {}
    leases: list[int] = []
    while choices.more():
        action, instance = choices.number(0, 9), choices.pick(store.instances)
        labels = [choices.number(0, 11)] * choices.number(0, 1)
        labels += range(first := choices.number(0, 11), first + choices.number(0, 4))
        hashes = [_hash(label) for label in labels]
        if hashes and choices.number(0, 15) == 0:
            hashes[-1] = choices.take(choices.number(0, 40))
        kind = _kind(choices, instance.source.fingerprint)
        if action <= 3:
            await _put(choices, store, instance, kind, hashes, put)
        elif action <= 5:
            request = kvstore_pb2.GetRequest(
                fingerprint=kind,
                block_hashes=hashes,
                lease_ms=choices.pick([0, 1, 60_000, 2**32 - 1]),
                wait_ms=choices.pick([0, 1, 2**32 - 1]),
                tenant=_tenant(choices),
            )
            if (answer := await store.call("Get", request)) is not None and answer.lease_id:
                leases.append(answer.lease_id)
                _check_lease(store, kind, hashes, answer, put)
        elif action == 6:
            lease_id = leases.pop() if leases and choices.flag() else choices.number(0, 2**64 - 1)
            await store.call("Release", kvstore_pb2.ReleaseRequest(lease_id=lease_id))
        elif action == 7:
            asked = kvstore_pb2.DeleteRequest(fingerprint=kind, block_hashes=hashes if choices.flag() else [])
            asked.all = choices.number(0, 3) == 0
            asked.tenant = choices.pick(["", "", "t", "\n"])
            await store.call("Delete", asked)
        elif action == 8:
            pin = kvstore_pb2.PinRequest(fingerprint=kind, block_hashes=hashes, unpin=choices.flag())
            await store.call("Pin", pin)
        else:
            contains = kvstore_pb2.ContainsRequest(fingerprint=kind, block_hashes=hashes, tenant=_tenant(choices))
            if (found := await store.call("Contains", contains)) is not None:
                assert all((_key(kind), name) in put for name in hashes[: found.num_blocks])
    for lease_id in leases:
        await store.call("Release", kvstore_pb2.ReleaseRequest(lease_id=lease_id))
    assert store.server.store.stats().num_leases == 0
    for held in list(store.server.store.pools):
        everything = kvstore_pb2.DeleteRequest(fingerprint=fingerprint_to_pb(held.fingerprint), all=True)
        assert await store.call("Delete", everything) is not None
    assert store.server.store.used_bytes == 0
    assert await store.call("GetStoreInfo", kvstore_pb2.GetStoreInfoRequest()) is not None
    assert await store.call("ListTenants", kvstore_pb2.ListTenantsRequest()) is not None


async def _put(
    choices: Choices,
    store: _Store,
    instance: _Instance,
    kind: common_pb2.Fingerprint,
    hashes: list[bytes],
    put: dict[tuple[bytes, bytes], set[int]],
) -> None:
    ids = [choices.number(0, _BLOCKS - 1) for _ in hashes]
    request = kvstore_pb2.PutRequest(
        fingerprint=kind,
        block_hashes=hashes,
        source=instance.source,
        block_ids=ids,
        generations=[choices.pick([0, 0, 0, 1, 2**64 - 1]) for _ in hashes],
        durable=choices.number(0, 7) == 0,
        pin=choices.number(0, 7) == 0,
        ttl_s=choices.pick([0, 0, 0, 1, 2**32 - 1]),
        tenant=_tenant(choices),
    )
    if choices.number(0, 7) == 0:
        request.source.fingerprint.CopyFrom(kind)
    if choices.number(0, 15) == 0:
        request.ready = choices.pick([2**62 + 1, 2**64 - 1])
    if choices.number(0, 15) == 0 and request.block_ids:
        request.block_ids[-1] = choices.pick([_BLOCKS, 2**31, 2**32 - 1])
    if choices.number(0, 15) == 0:
        request.generations.append(0)
    if choices.number(0, 15) == 0:
        request.source.epoch = choices.take(choices.number(0, 20))
        request.source.num_blocks = choices.pick([0, _BLOCKS, 2**32 - 1])
        request.source.endpoints[0].kind = choices.pick(["shm", "tcp", "", "\0"])
        request.source.endpoints[0].address = choices.pick(["", "x", "127.0.0.1:1", "@x", "[::1", ":", "{}"])
    for name, block in zip(hashes, ids, strict=True):  # what a call brings that fails counts, too
        put.setdefault((_key(kind), name), set()).add(block)
    answer = await store.call("Put", request)
    assert answer is None or len(answer.stored) == len(hashes)


def _check_lease(
    store: _Store,
    kind: common_pb2.Fingerprint,
    hashes: list[bytes],
    answer: kvstore_pb2.GetResponse,
    put: dict[tuple[bytes, bytes], set[int]],
) -> None:
    (pool,) = [each for each in store.server.store.pools if each.fingerprint.digest() == _key(kind)]
    assert len(answer.block_ids) == len(answer.generations) <= len(hashes)
    for name, slot, generation in zip(hashes, answer.block_ids, answer.generations, strict=False):
        assert pool.arena.generations[slot] == generation
        (value,) = set(pool.arena.blocks[slot].tolist())
        assert value - 1 in put[_key(kind), name]
