from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from baton_kernels.cpu import CpuLibrary, load_library, runnable_variants


@pytest.fixture(scope="session")
def library() -> CpuLibrary:
    variants = runnable_variants()
    if not variants:
        pytest.skip("no C++ operators for this machine")
    return load_library(variants[0])


@pytest.fixture(params=[each.name for each in runnable_variants()])
def build(request: pytest.FixtureRequest) -> CpuLibrary:
    """Every build of the operators that this processor can run."""
    return load_library(next(each for each in runnable_variants() if each.name == request.param))


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
