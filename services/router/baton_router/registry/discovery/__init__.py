"""Finding instances: beside those on the command line and those that register here, through Redis or Kubernetes.

A source tells the registry which addresses there are (``Registry.found``). What an instance is, it says itself: the
monitor asks, and refuses one that does not fit.
"""

from __future__ import annotations

import logging
from typing import Protocol

from baton.config.router import RouterConfig
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls
from baton_router.registry.registry import Registry


class Discovery(Protocol):
    """A source of instances."""

    def start(self) -> None:
        """Begin; needs a running loop."""

    async def close(self) -> None: ...


def discoveries(config: RouterConfig, registry: Registry, token: Token | None, tls: Tls | None) -> list[Discovery]:
    """Make the sources that ``config.discover`` names.

    Raises:
        ConfigError: One cannot work; names the field.
    """
    found: list[Discovery] = []
    # Imported here: a router without them needs neither client.
    if "redis" in config.discover:
        from baton_router.registry.discovery.redis import RedisDiscovery

        found.append(RedisDiscovery(config, registry, token))
    if "kubernetes" in config.discover:
        from baton_router.registry.discovery.kubernetes import KubernetesDiscovery

        logging.getLogger("httpx").setLevel(logging.WARNING)  # it would tell of every request
        found.append(KubernetesDiscovery(config, registry, token, tls))
    return found
