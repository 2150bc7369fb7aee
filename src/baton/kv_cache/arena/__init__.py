"""The memory of a KV pool: the protocol and the state that is shared of it (``base``), host memory (``host``)."""

from baton.kv_cache.arena.base import Arena, ArenaState, Progress, SharedDeviceArena, Spans, whole_blocks
from baton.kv_cache.arena.host import HostArena, arena_bytes

__all__ = ["Arena", "ArenaState", "HostArena", "Progress", "SharedDeviceArena", "Spans", "arena_bytes", "whole_blocks"]
