"""The memory of a KV pool: the protocol (``base``), the state shared of it (``state``), host memory (``host``)."""

from baton.kv_cache.arena.base import Arena, Spans, whole_blocks
from baton.kv_cache.arena.host import HostArena, arena_bytes
from baton.kv_cache.arena.state import ArenaState, Progress

__all__ = ["Arena", "ArenaState", "HostArena", "Progress", "Spans", "arena_bytes", "whole_blocks"]
