"""What the integration tests share."""

from __future__ import annotations

import pytest

from baton.testing.equality import References


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("checkpoints"))
