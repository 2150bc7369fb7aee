"""Tests of the store connector run with stores of every make-up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.transport.kvstore_tiers import MAKE_UPS, RedisThread, options_of, redis_thread
from tests.support.transport.store_engine import BLOCK, STORE_OPTIONS


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisThread | None]:
    """One for all of these files; every test begins with an empty one."""
    with redis_thread() as made:
        yield made


@pytest.fixture(params=MAKE_UPS, autouse=True)
def tiers(
    request: pytest.FixtureRequest, tmp_path: Path, redis: RedisThread | None, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Every test runs with a store in memory, and with such of which most lies in tiers behind."""
    monkeypatch.setitem(STORE_OPTIONS, "more", options_of(request.param, tmp_path, redis, BLOCK))
    return str(request.param)
