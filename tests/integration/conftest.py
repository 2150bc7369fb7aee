"""What the integration tests share."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator

import pytest
from tests.support.equality import References
from tests.support.servers.warm import WarmProcess, WarmStarter

from baton.engine.executor import multiprocess
from baton.kv_transfer.connector.p2p import consumer
from baton.kv_transfer.connector.store.backend import StoreOptions
from baton.rpc.redis import open_redis
from baton.worker import connectors

PATIENCE_S = 240.0


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a service that lives may be late: what tests count on is waited for.

    Those who want to see somebody given up say so themselves.
    """
    monkeypatch.setattr(consumer, "ACKNOWLEDGE_S", PATIENCE_S)
    times = dict.fromkeys(("call_timeout_s", "load_timeout_s", "save_timeout_s"), PATIENCE_S)
    monkeypatch.setattr(connectors, "StoreOptions", functools.partial(StoreOptions, **times))
    monkeypatch.setitem(open_redis.__kwdefaults__, "timeout_s", PATIENCE_S)


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
