"""What the integration tests share."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from tests.support.equality import References
from tests.support.servers.warm import WarmProcess, WarmStarter

from baton.engine.executor import multiprocess


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers of this run
    (folder / "references").mkdir(exist_ok=True)
    return References(folder / "references")


@pytest.fixture(scope="module")
def warm_followers(starter: WarmStarter) -> Iterator[None]:
    """Let ranks start without importing torch each; ``test_parallel_service.py`` has them as they are in service."""

    def start(line: socket.socket) -> WarmProcess:
        return starter.start("baton.engine.executor.follower", [str(line.fileno())], keep=line.fileno())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocess, "start_follower", start)
        yield
