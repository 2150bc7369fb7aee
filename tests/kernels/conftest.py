from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from baton.config.paths import cache_dir
from baton_kernels.cpu import CpuLibrary, load_library
from baton_kernels.cpu.build import COMPILERS


@pytest.fixture(scope="session")
def library() -> CpuLibrary:
    if not any(shutil.which(name) for name in COMPILERS):
        pytest.skip("no C++ compiler")
    return load_library(cache_dir())


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
