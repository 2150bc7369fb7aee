"""Schemas that cost much, through a router and instances: refused or answered, and nobody else notices."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import httpx
import psutil
import pytest
from tests.grammars.beside import COSTLY, streams, streams_beside
from tests.support.servers.up import Running, running_up

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def up(model: str) -> Iterator[Running]:
    with running_up("--ratio", "1P1D", "--dtype", "float32", "--model", model) as running:
        yield running


async def test_streams_beside_costly_schemas_have_the_tokens_that_they_have_alone(up: Running) -> None:
    services = {child.pid for child in psutil.Process(up.process.pid).children()}
    async with httpx.AsyncClient(base_url=up.url, timeout=240) as client:
        alone, _ = await streams(client, tokens=120)
        assert all(alone)
        sent, numbers, names = Counter[str](), itertools.count(), itertools.cycle(COSTLY)
        while sent.keys() != COSTLY.keys():  # each of them was answered as it should be, see send_costly
            beside, _, more = await streams_beside(client, numbers, tokens=120, names=names)
            assert beside == alone
            sent += more
        metrics = (await client.get("/metrics")).text
    assert "baton_router_grammars_refused_total" in metrics
    assert services == {child.pid for child in psutil.Process(up.process.pid).children()}
