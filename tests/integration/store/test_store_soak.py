"""The soak of the KV store, shortened: its own checks hold, and they would find what they look for."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from baton.errors import InternalError
from baton_kvstore.memory.eviction import POLICIES

FILE = Path(__file__).resolve().parents[3] / "benchmarks" / "store" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("store_soak", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["store_soak"] = module  # dataclasses look their annotations up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["store_soak"]


@pytest.mark.parametrize("eviction", POLICIES)
def test_thousands_of_operations_add_up(soak: ModuleType, eviction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "SAMPLES", 10)
    monkeypatch.setattr(soak, "SLOTS", 500)
    monkeypatch.setattr(soak, "CHAINS", 600)
    part: Any = soak.Objects(eviction, 1).run(15_000)
    assert part.operations == 15_000
    assert part.checks == 11
    assert part.counts["evictions"] > 1000
    assert part.counts["given back"] > 1000
    assert part.compared > 5000
    for name in ("blocks stored", "blocks found", "blocks deleted", "missed", "ran out", "expire"):
        assert part.counts[name] > 0, name


def test_hundreds_of_operations_through_the_service_add_up(
    soak: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "SAMPLES", 10)
    monkeypatch.setattr(soak, "CHAINS", 400)
    part: Any = asyncio.run(soak.Service(tmp_path, 1).run(600))
    assert part.operations == 600
    assert part.checks == 10
    assert part.compared > 100
    assert part.counts["blocks stored"] > 300
    assert part.counts["blocks deleted"] > 0


def test_a_wrong_byte_and_a_lost_slot_are_found(soak: ModuleType) -> None:
    part: Any = soak.Objects("lru", 1)
    for number in range(40):
        part._put_blocks(part._kinds[0], part._chains[number])
    part.check()
    pool = part.store.pools[0]
    name, entry = next(iter(pool.index.items()))
    pool.arena.blocks[entry.slot, -1] ^= 1
    with pytest.raises(InternalError, match=name.hex()):
        part.check()
    pool.arena.blocks[entry.slot, -1] ^= 1
    part.check()
    pool.allocate_cold()
    with pytest.raises(AssertionError):
        part.check()


def test_growth_is_the_last_fifth_against_the_first(soak: ModuleType) -> None:
    part: Any = soak.Part("x", memory=[100] * 5 + [500] * 15 + [110] * 5)
    assert part.growth_percent == 10.0
