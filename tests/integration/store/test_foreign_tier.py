"""A tier of another package behind a store: one factory and an entry point."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from tests.integration.store.test_kvstore_tiers import LOOKUPS, load
from tests.support.servers.kvstore_service import KIND, WAIT_S, connected, eventually, scrape, store
from tests.support.transport.named_blocks import names

from baton import plugins
from baton.api.v1 import kvstore_pb2
from baton.config.kvstore import KVStoreConfig
from baton.errors import ConfigError
from baton.rpc.convert import fingerprint_to_pb
from baton.rpc.server import free_port
from baton.types import BlockHash
from baton_kvstore.tiers.chain import Link
from baton_kvstore.tiers.open import STORE_TIERS, TierContext, open_chain, remote_link
from baton_kvstore.types import KvFormat

SHELVES: dict[str, dict[tuple[KvFormat, BlockHash], bytes]] = {}


class Shelf:
    """A backend that keeps values in this process, under a name that stores share."""

    def __init__(self, name: str) -> None:
        self._values, self._lock = SHELVES.setdefault(name, {}), threading.Lock()
        self.on_new_server: Callable[[], None] = lambda: None

    def get(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> list[bytes | None]:
        with self._lock:
            return [self._values.get((kind, name)) for name in hashes]

    def write(self, kind: KvFormat, hashes: Sequence[BlockHash], values: Sequence[bytes]) -> list[bool]:
        with self._lock:
            self._values.update({(kind, name): bytes(value) for name, value in zip(hashes, values, strict=True)})
        return [True] * len(hashes)

    def has(self, kind: KvFormat, hashes: Sequence[BlockHash]) -> list[bool | None]:
        with self._lock:
            return [(kind, name) in self._values for name in hashes]

    def delete(self, kind: KvFormat, hashes: Sequence[BlockHash] | None) -> None:
        with self._lock:
            for key in [key for key in self._values if key[0] == kind and (hashes is None or key[1] in hashes)]:
                del self._values[key]

    def scan(self) -> Iterator[tuple[KvFormat, list[BlockHash]]]:
        with self._lock:
            found = list(self._values)
        yield from ((kind, [name]) for kind, name in found)

    def used_bytes(self) -> int | None:
        with self._lock:
            return sum(map(len, self._values.values()))

    def close(self) -> None:
        pass


def open_tier(context: TierContext) -> Link:
    if "name" not in context.options:
        raise ConfigError("a shelf needs shelf.name", field="tier_options")
    return remote_link(
        "shelf", context, Shelf(context.options["name"]), durable=False, batch_bytes=1 << 20, write_all=True
    )


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    point = EntryPoint("shelf", f"{__name__}:open_tier", STORE_TIERS.entry_point_group)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
    SHELVES.clear()
    yield
    SHELVES.clear()


@pytest.mark.usefixtures("_registered")
async def test_blocks_come_back_from_a_tier_of_another_package() -> None:
    settings: dict[str, Any] = {"tiers": ("disk", "shelf"), "tier_options": ("shelf.name=a",), **LOOKUPS}
    async with store(**settings) as first, connected(first) as instance:
        await instance.put(1, 2, 3)
        await eventually(lambda: len(SHELVES["a"]) == 3)
        assert {kind.key for kind, _ in SHELVES["a"]} == {KIND.digest()}
    async with store(**settings) as second, connected(second) as instance:
        assert await load(instance, 1, 2, 3, 4) == 3
        assert second.tiers.counters.hits["shelf"] == 3
    port = free_port()
    async with store(**settings, metrics_port=port) as third, connected(third) as instance:
        request = kvstore_pb2.DeleteRequest(fingerprint=fingerprint_to_pb(KIND), block_hashes=names(1, 2))
        assert (await instance.stub.Delete(request, timeout=WAIT_S)).num_deleted == 2
        assert len(SHELVES["a"]) == 1
        page = await asyncio.to_thread(scrape, port)
        assert 'baton_kvstore_tier_blocks{tier="shelf"} 1.0' in page


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize(
    ("settings", "field", "why"),
    [
        ({"tiers": ("nosuch",)}, "tiers", "nosuch"),
        ({"tiers": ("shelf",)}, "tier_options", "shelf.name"),
        ({"tiers": ("shelf", "shelf")}, "tiers", "twice"),
        ({"tiers": ("disk",), "tier_options": ("shelf.name=a",)}, "tier_options", "name.key=value"),
        ({"tiers": ("disk",), "redis_url": "redis://127.0.0.1:1"}, "tiers", "redis"),
    ],
)
def test_a_tier_that_cannot_be_opened_is_named(settings: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        open_chain(KVStoreConfig(**settings))
    assert caught.value.field == field
