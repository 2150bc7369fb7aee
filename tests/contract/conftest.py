"""Contract suites take a pipe of another package too: it is installed as a package is, by its entry point."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.transport import file_pipe


@pytest.fixture(scope="module", autouse=True)
def installed_file_pipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    site = tmp_path_factory.mktemp("site")
    file_pipe.install(site)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield
