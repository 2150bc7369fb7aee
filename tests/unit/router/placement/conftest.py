"""What tests of placement share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.support.router.pending_fleet import Fleet
from tests.support.router.placement_cluster import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.registry.close()


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()
