"""How a KV store is used, and what that came to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from baton.errors import ConfigError


@dataclass(frozen=True)
class StoreOptions:
    """How a store is used. Times in seconds.

    Attributes:
        address: ``host:port`` of the store.
        token: Shared token, if the services use one.
        min_load_tokens: Missing tokens from which asking the store pays.
        call_timeout_s: Time the store has for an answer that moves no bytes.
        load_timeout_s: Time one request's load may take.
        save_timeout_s: Time one Put may take, and longest time that an ended request's blocks are held for the store.
        max_loads: Loads at once; requests beyond it are computed.
        max_saves: Requests whose blocks are being saved at once; those beyond it are not saved.
        max_puts: Puts at once.
        blocks_per_call: Blocks in one call.
        failures: Failures in a row after which the store is left alone for ``cooldown_s``.

    Raises:
        ConfigError: Names the field.
    """

    address: str
    token: str | None = field(default=None, repr=False)
    min_load_tokens: int = 1
    call_timeout_s: float = 1.0
    load_timeout_s: float = 10.0
    save_timeout_s: float = 10.0
    max_loads: int = 64
    max_saves: int = 256
    max_puts: int = 4
    blocks_per_call: int = 1024
    failures: int = 3
    cooldown_s: float = 5.0

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"the KV store's address must be host:port, got {self.address!r}", field="kvstore")
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, (int, float)) and value <= 0:
                raise ConfigError(f"{item.name} must be positive, got {value}", field=item.name)


@dataclass
class StoreUse:
    """What a connector did since its start, for metrics. Written in the loop's thread unless it says otherwise."""

    loads: int = 0
    """Loads that ended, whatever with."""
    load_hits: int = 0
    """Loads that brought at least one block."""
    load_failures: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    saves: int = 0
    """Puts that the store answered."""
    save_failures: int = 0
    saved_blocks: int = 0
    """Blocks that the store held after a Put, new or not."""
    saved_bytes: int = 0
    """Bytes that the store pulled."""
    skipped_loads: int = 0
    """Requests that were not looked for, because too many were or the store was left alone (engine's thread)."""
    skipped_saves: int = 0
    """Calls of ``blocks_computed`` that were not followed by a save, for the same reasons (engine's thread)."""
    times_left_alone: int = 0
    """How often failures in a row made the connector leave the store alone."""
