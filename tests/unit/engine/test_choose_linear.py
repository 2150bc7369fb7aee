"""Which linear layers a model gets, by what the processor and the library can do."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.config import EngineConfig
from baton.engine.device import ComputeDevice
from baton.engine.models.generic import choose_linear
from baton_kernels.cpu import CpuLibrary, load_library, runnable_variants


@pytest.fixture(scope="module")
def library() -> CpuLibrary:
    variants = runnable_variants()
    if not variants:
        pytest.skip("no C++ operators for this machine")
    return copy.copy(load_library(variants[0]))


@pytest.mark.parametrize(
    ("amx", "processor_amx", "pairs", "dtype", "name"),
    [
        (True, True, True, "bfloat16", "amx"),
        (False, True, True, "bfloat16", "onednn"),
        (False, False, True, "bfloat16", "pairs"),
        (False, False, False, "bfloat16", "cpp"),
        (True, True, True, "float32", "torch"),
    ],
)
def test_the_fastest_that_there_is_is_chosen(
    library: CpuLibrary,
    monkeypatch: pytest.MonkeyPatch,
    amx: bool,
    processor_amx: bool,
    pairs: bool,
    dtype: str,
    name: str,
) -> None:
    library.amx, library.pairs_are_faster = amx, pairs
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: processor_amx)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    model: Any = SimpleNamespace(compute=ComputeDevice(torch.device("cpu"), on_gpu=False), dtype=dtype)
    assert choose_linear(EngineConfig(model="unused"), model, library)[0] == name
    assert choose_linear(EngineConfig(model="unused", packed_linears=False), model, library)[0] == "torch"
