from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    """Memory that an operator takes and does not write is not a number, where torch can be told so at no risk."""
    if torch.cuda.is_available():  # there, that makes other operators fail
        yield
        return
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
