"""What the integration tests share."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from baton.engine.parallel import processes
from baton.testing.equality import References
from baton.testing.warm import WarmProcess, WarmStarter


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def warm_followers(starter: WarmStarter) -> Iterator[None]:
    """Let ranks start without importing torch each; ``test_parallel_service.py`` has them as they are in service."""

    def start(line: socket.socket) -> WarmProcess:
        return starter.start("baton.engine.parallel.follower", [str(line.fileno())], keep=line.fileno())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start_follower", start)
        yield
