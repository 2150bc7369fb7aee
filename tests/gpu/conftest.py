"""Tests of what only a GPU can show; elsewhere they are skipped, and say why.

The same orchestration runs in the ordinary suite, in Triton's interpreter (``--device interpret``).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.equality import References

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="needs a CUDA device: torch sees none")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(missing)


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("checkpoints"))
