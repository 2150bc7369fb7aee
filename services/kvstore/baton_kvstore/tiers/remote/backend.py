"""What a tier asks of the thing that keeps its blocks on other machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from baton.types import BlockHash
from baton_kvstore.tiers.disk.format import Kind


class RemoteError(Exception):
    """A backend is away, too slow, or answered with an error."""


class Backend(Protocol):
    """Values by kind and block hash. Every method may be called from any thread, blocks it, but not for ever.

    Attributes:
        on_new_server: Called, in any thread, when another server answers than before: blocks may be lost.

    Raises:
        RemoteError: By every method.
    """

    on_new_server: Callable[[], None]

    def get(self, kind: Kind, hashes: Sequence[BlockHash]) -> list[bytes | None]:
        """Return values; ``None``: there is none."""

    def put(self, kind: Kind, hashes: Sequence[BlockHash], values: Sequence[bytes]) -> list[bool]:
        """Write values and return which were taken; one that is there already is replaced, at once as a whole."""

    def has(self, kind: Kind, hashes: Sequence[BlockHash]) -> list[bool | None]:
        """Return which are there. ``None``: not looked for, because an earlier block of the chain is not there."""

    def delete(self, kind: Kind, hashes: Sequence[BlockHash] | None) -> None:
        """Delete values (``None``: all of the kind)."""

    def scan(self) -> Iterator[tuple[Kind, list[BlockHash]]]:
        """Yield what is there, little by little, in any order."""

    def used_bytes(self) -> int | None:
        """Return the memory that everything there takes; ``None``: nobody knows."""

    def close(self) -> None:
        """Close connections; running calls fail."""
