"""What tests of the engine's connectors share."""

from __future__ import annotations

import pytest
from tests.support.models.linked_engines import Engine


@pytest.fixture
def pair() -> tuple[Engine, Engine]:
    prefill = Engine()
    return prefill, Engine(source=prefill)
