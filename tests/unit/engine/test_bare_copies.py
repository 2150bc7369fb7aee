"""Copies of CUDA's runtime as they are called, by a library that stands in for it and moves the bytes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from baton.engine import device_memory as memory
from baton.engine.device_memory import Place, queue_copy


class Runtime:
    """Takes the arguments that CUDA's runtime takes (CUDA Runtime API, 6.11 memory management)."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def call(self, name: str, *given: Any) -> None:
        values = [each.value for each in given]
        if name == "cudaMemcpyPeerAsync":
            to, to_device, since, from_device, count, stream = values
            self.calls.append((to_device, from_device, stream))
        else:
            assert name == "cudaMemcpyAsync"
            to, since, count, kind, stream = values
            self.calls.append(({1: "to device", 2: "to host"}[kind], stream))
        ctypes.memmove(to, since, count)


@pytest.mark.parametrize(
    ("to", "since", "called"),
    [
        (1, 0, [(1, 0, 7)]),
        (0, 0, [(0, 0, 7)]),
        (None, 3, [("to host", 7)]),
        (3, None, [("to device", 7)]),
        (None, None, []),
    ],
)
def test_each_direction_is_the_call_for_it(
    monkeypatch: pytest.MonkeyPatch, to: int | None, since: int | None, called: list[tuple[Any, ...]]
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(memory, "_call_cuda", runtime.call)
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    queue_copy(Place(target.ctypes.data, to) + 10, Place(source.ctypes.data, since) + 30, 50, 7)
    assert runtime.calls == called
    assert target[10:60].tolist() == list(range(30, 80))
    assert not target[:10].any()
    assert not target[60:].any()
