"""Which block goes next: one small protocol, a file per policy; ``EVICTION_POLICIES`` in ``config.py`` names them."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from baton_kvstore.config import EVICTION_POLICIES
from baton_kvstore.memory.eviction.base import Eviction
from baton_kvstore.memory.eviction.lru import Lru
from baton_kvstore.memory.eviction.s3fifo import S3Fifo


def _load(target: str) -> Callable[..., Eviction]:
    module, _, name = target.partition(":")
    policy: Callable[..., Eviction] = getattr(importlib.import_module(module), name)
    return policy


POLICIES: dict[str, Callable[..., Eviction]] = {name: _load(target) for name, target in EVICTION_POLICIES.items()}
"""By the names that ``--eviction`` takes."""

__all__ = ["POLICIES", "Eviction", "Lru", "S3Fifo"]
