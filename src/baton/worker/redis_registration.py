"""Making an instance known through Redis: a key with a time to live, renewed by heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random

from baton.rpc.redis_client import LEASE_TTL_S, NEWS_LENGTH, instance_key, news_key, open_redis, redis_errors
from baton.worker.registration import Identity

log = logging.getLogger(__name__)

_RETRY_S = 0.5


class RedisRegistration:
    """Keeps one instance's key until :meth:`stop`.

    Args:
        url: Where Redis is.
        prefix: Put before every key.
        identity: Who registers.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """

    def __init__(self, url: str, prefix: str, identity: Identity) -> None:
        self._redis = open_redis(url)
        self._prefix, self._identity = prefix, identity
        self._key = instance_key(prefix, identity.instance_id)
        self._task: asyncio.Task[None] | None = None
        self._known = False

    def start(self) -> None:
        """Begin in the background."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="registration redis")

    async def stop(self) -> None:
        """Take the key away and tell."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        with contextlib.suppress(*redis_errors()):  # the key's time ends it
            if self._known:
                await self._redis.delete(self._key)
                await self._tell("left")
        await self._redis.aclose()

    async def _run(self) -> None:
        who, away = self._identity, False
        value = json.dumps({"address": who.address, "role": who.role.value, "epoch": who.epoch.hex()})
        while True:
            try:
                before = await self._redis.set(self._key, value, px=int(1000 * LEASE_TTL_S), get=True)
                if before is None:
                    await self._tell("came")
                    log.info("registered with Redis")
                self._known, away, pause_s = True, False, LEASE_TTL_S / 3
            except redis_errors() as error:
                # Once per absence, not once per try.
                log.log(logging.DEBUG if away else logging.WARNING, "Redis is away: %s", error)
                away, pause_s = True, _RETRY_S
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.0))

    async def _tell(self, what: str) -> None:
        await self._redis.xadd(
            news_key(self._prefix),
            {"instance": str(self._identity.instance_id), "what": what},
            maxlen=NEWS_LENGTH,
            approximate=True,
        )
