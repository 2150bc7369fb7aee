"""What the HTTP front's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.servers.http_front import Served


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with Served(
        max_body_bytes=200_000, max_prompts=4, max_sequences=128, cors_origins=("https://ui.example",)
    ) as served:
        yield served


@pytest.fixture
def api(running: Served) -> Served:
    running.reset()
    return running
