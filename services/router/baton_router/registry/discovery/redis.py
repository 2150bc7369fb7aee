"""Instances that registered in Redis; each keeps a key with a time to live."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from baton.config.router import RouterConfig, check_address
from baton.rpc.redis import (
    MAX_ANSWER_BYTES,
    Registrations,
    RegistrationWatch,
    cancel_task,
    instance_key,
    news_key,
    open_redis,
)
from baton.rpc.service_token import Token
from baton.types import Role
from baton_router.registry.registry import Registry

SOURCE = "redis"
_ROUND_S = 0.8


class RedisDiscovery:
    """Watches the keys of instances.

    Args:
        config: Where Redis is.
        registry: Is told.
        token: The services'; with one, registrations that it has not signed are passed over.
        now: Monotonic clock.

    Attributes:
        watch: Follows them.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        token: Token | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = open_redis(config.redis, most=MAX_ANSWER_BYTES)
        key = instance_key(config.redis_prefix, "")
        refused = partial(registry.refused_in_redis, "instance")
        registrations = Registrations(self._redis, key, token, _parse, refused)
        self.watch = RegistrationWatch(
            registrations,
            news_key(config.redis_prefix),
            "instances",
            round_s=_ROUND_S,
            now=now,
            on_failure=partial(registry.discovery_failed, SOURCE),
        )
        self._registry = registry
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch; needs a running loop."""
        self._task = asyncio.create_task(self.watch.run(self._take), name="discovery redis")

    async def close(self) -> None:
        if self._task is not None:
            await cancel_task(self._task)
        await self._redis.aclose()

    def _take(self, instances: Collection[tuple[str, Role]]) -> None:
        self._registry.found(SOURCE, dict(instances))


def _parse(fields: Mapping[str, Any]) -> tuple[str, Role]:
    check_address(fields["address"], field="address")
    return fields["address"], Role(fields["role"])
