"""What an instance holds outside its pool, as its routers are told of it."""

from __future__ import annotations

from collections.abc import Callable

from baton.kv_cache.events import BlocksStored, KVEvent


class TierBoard:
    """Joins the connectors that keep blocks with the instance's log of KV events. Lives in one event loop."""

    def __init__(self) -> None:
        self._snapshots: list[Callable[[], list[BlocksStored]]] = []
        self._log: Callable[[list[KVEvent]], None] | None = None

    def add(self, snapshot: Callable[[], list[BlocksStored]]) -> None:
        """Let somebody be asked what is there; each change must be told in the same step of the loop."""
        self._snapshots.append(snapshot)

    def bind(self, log: Callable[[list[KVEvent]], None]) -> None:
        """Say where changes go; those before were told to nobody, for nobody listened."""
        self._log = log

    def tell(self, events: list[KVEvent]) -> None:
        """Tell of a change."""
        if self._log is not None:
            self._log(events)

    def snapshot(self) -> list[BlocksStored]:
        """Return everything that is there."""
        return [event for snapshot in self._snapshots for event in snapshot()]
