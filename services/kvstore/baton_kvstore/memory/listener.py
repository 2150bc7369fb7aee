"""Who wants to hear which blocks a tier gained and lost."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from baton.types import BlockHash
from baton_kvstore.tiers.disk.format import Kind

log = logging.getLogger(__name__)


class TierListener(Protocol):
    """Hears of changes: ``listener(kind, hashes, tier, present)``.

    What is promised, per tier:

    - A block is told as present after it can be found, and as not present after it cannot any more, in the order in
      which that happened. A tier that forgets and finds again says both.
    - Whoever begins to listen is told of everything that is there first, then of changes; nothing in between is lost.
    - Of ``memory`` and ``disk`` every change is told. ``redis`` and ``object`` are shared with other nodes: told is
      what this node knows of, so a block that another node or the server dropped counts as present until a read
      misses it.

    Calls come from the event loop (``memory``) or from any thread, while the tier is locked: append to a queue and
    return. Do not wait, do not raise, and do not call the tier.
    """

    def __call__(self, kind: Kind, hashes: Sequence[BlockHash], tier: str, present: bool) -> None:
        """Hear that blocks of one kind came to or left a tier: ``memory``, ``disk``, ``redis`` or ``object``."""


class Listeners:
    """The listeners of one tier; the tier calls this while it is locked."""

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self._listeners: list[TierListener] = []

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def add(self, listener: TierListener) -> None:
        """Tell it everything from now on."""
        self._listeners.append(listener)

    def tell(self, kind: Kind, hashes: Sequence[BlockHash], present: bool) -> None:
        """Tell everybody; a listener that fails is logged, and others still hear."""
        if not hashes:
            return
        for listener in self._listeners:
            try:
                listener(kind, hashes, self.tier, present)
            except Exception:
                log.exception("a listener of tier %s failed", self.tier)
