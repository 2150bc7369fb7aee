"""The memory of a KV pool: the protocol and the state that is shared of it (``base``), host memory (``host``)."""

from baton.kv_cache.arena.base import (
    Arena,
    ArenaState,
    MemoryRange,
    Progress,
    SharedDeviceArena,
    Spans,
    memory_range,
    whole_blocks,
)
from baton.kv_cache.arena.host import HostArena, arena_bytes

__all__ = [
    "Arena",
    "ArenaState",
    "HostArena",
    "MemoryRange",
    "Progress",
    "SharedDeviceArena",
    "Spans",
    "arena_bytes",
    "memory_range",
    "whole_blocks",
]
