"""What the chart's tests share."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _schemas_are_read_once() -> Iterator[None]:
    """Kubernetes' schemas are megabytes, read for every object."""
    utils = pytest.importorskip("kubernetes_validate").utils
    patch = pytest.MonkeyPatch()
    patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
    yield
    patch.undo()
