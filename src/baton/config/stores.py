"""Addresses for ``--kvstore``: one or more nodes, nodes that register themselves, a Redis, or a Mooncake Store."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.secrets import shown_url
from baton.errors import ConfigError

DISCOVER = "discover"
MOONCAKE = "mooncake"
REDIS_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store's address; exactly one attribute is set.

    Attributes:
        nodes: ``host:port`` of each node, in the order given.
        redis: URL of a Redis that keeps the blocks itself.
        mooncake: URL of a Mooncake Store's master.
        discover: Whether the nodes register themselves in Redis.
    """

    nodes: tuple[str, ...] = ()
    redis: str = ""
    mooncake: str = ""
    discover: bool = False

    @classmethod
    def parse(cls, text: str) -> StoreAddress:
        """Parse ``--kvstore``.

        Raises:
            ConfigError: The text is no store address.
        """
        if text == DISCOVER:
            return cls(discover=True)
        scheme, separator, rest = text.partition("://")
        if separator:
            if scheme == MOONCAKE and rest:
                return cls(mooncake=text)
            if scheme not in REDIS_SCHEMES or not rest:
                known = ", ".join(f"{name}://" for name in (*REDIS_SCHEMES, MOONCAKE))
                raise ConfigError(f"kvstore: {scheme}:// is no store; known are {known}", field="kvstore")
            return cls(redis=text)
        nodes = tuple(part.strip() for part in text.split(",") if part.strip())
        for node in nodes:
            host, _, port = node.rpartition(":")
            if not host or not port.isdigit():
                raise ConfigError(
                    f"kvstore: the KV store's address must be host:port, got {shown_url(node)!r}", field="kvstore"
                )
        if not nodes:
            raise ConfigError("kvstore: no address", field="kvstore")
        if len(set(nodes)) < len(nodes):
            raise ConfigError(f"kvstore names a node twice: {text}", field="kvstore")
        return cls(nodes=nodes)
