"""What tests of the dispatcher share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from tests.support.router.world import World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        yield World(stack)
