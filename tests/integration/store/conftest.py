"""What the store's integration tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from baton.config.kvstore import KVStoreConfig
from baton_kvstore.server import KVStoreServer


@pytest.fixture
async def store() -> AsyncIterator[KVStoreServer]:
    server = KVStoreServer(KVStoreConfig(capacity_bytes=64 * 2**20))
    await server.start()
    yield server
    await server.stop(0)
