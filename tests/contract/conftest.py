"""What the contract suites share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.transport import file_pipe
from tests.support.transport.store_engine import Host
from tests.support.transport.transport_rig import KINDS, Rig


@pytest.fixture(scope="module", autouse=True)
def installed_file_pipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """They take a pipe of another package too: it is installed as a package is, by its entry point."""
    site = tmp_path_factory.mktemp("site")
    file_pipe.install(site)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@pytest.fixture(params=KINDS, ids=lambda p: f"{p[0]}-{p[1]}")
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(*request.param)
    yield rig
    rig.close()


@pytest.fixture
def tcp_rig() -> Iterator[Rig]:
    rig = Rig("tcp")
    yield rig
    rig.close()
