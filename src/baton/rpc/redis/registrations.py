"""How instances and KV store nodes register in Redis, and how what stands there is believed.

Each keeps a key with a time to live, and a stream tells who came and who left. Where the services have a token a
registration is signed with it: the key, the address and all else, and the time, by Redis' clock, until which it counts.
So whoever can write to Redis can take registrations away, but cannot make one, change one, give one another name, or
bring an old one back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from baton.errors import UnauthenticatedError
from baton.logs import Absence
from baton.rpc.redis.client import end_task, open_redis, redis_errors, redis_ms
from baton.rpc.service_token import Token

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)

LEASE_TTL_S = 10.0
"""Life of a registration; it is renewed three times as often."""
NEWS_LENGTH = 1024
_RETRY_S = 0.5
_SLACK_MS = 2000
"""How much longer than its key's life a signature counts: the key is written some time after it was signed."""
_PURPOSE = b"registration in Redis"


def instance_key(prefix: str, instance_id: str) -> str:
    """Return the key of an instance's registration."""
    return f"{prefix}:instance:{instance_id}"


def news_key(prefix: str) -> str:
    """Return the stream that tells who came and who left."""
    return f"{prefix}:instances"


def store_node_key(prefix: str, name: str) -> str:
    """Return the key of a KV store node's registration."""
    return f"{prefix}:kvstore:{name}"


def store_news_key(prefix: str) -> str:
    """Return the stream that tells which nodes came and left."""
    return f"{prefix}:kvstores"


def sign_registration(token: Token | None, key: str, fields: Mapping[str, str], now_ms: int) -> str:
    """Return what stands under a key; without a token just the fields.

    Args:
        token: The services'.
        key: Where it will stand.
        fields: What others are told.
        now_ms: Redis' time.
    """
    if token is None:
        return json.dumps(dict(fields))
    until_ms = now_ms + int(1000 * LEASE_TTL_S) + _SLACK_MS
    body = json.dumps({**fields, "key": key, "until_ms": until_ms})
    return json.dumps({"body": body, "mac": token.mac(_PURPOSE, body.encode()).hex()})


def read_registration(token: Token | None, key: str, value: bytes | str, now_ms: int) -> tuple[Mapping[str, Any], int]:
    """Return the fields of a registration, and until when they count (ms of Redis' time; 0: they are not signed).

    Args:
        token: The services'.
        key: Where it stands.
        value: What stands there.
        now_ms: Redis' time.

    Raises:
        UnauthenticatedError: It is not signed with the token, or for another key, or counts no more.
        ValueError: It cannot be read.
    """
    outer = json.loads(value)
    if not isinstance(outer, dict):
        raise ValueError("it is no object")
    body = outer.get("body")
    mac = outer.get("mac")
    if token is None:
        if mac is not None:
            raise UnauthenticatedError("it is signed with a token, and there is none here", field="token")
        return outer, 0
    if not (isinstance(body, str) and isinstance(mac, str)):
        raise UnauthenticatedError("it is not signed", field="token")
    if not token.verifies(_PURPOSE, body.encode(errors="replace"), bytes.fromhex(mac)):
        raise UnauthenticatedError("it is signed with another token, or was changed", field="token")
    fields = json.loads(body)
    if fields["key"] != key:
        raise UnauthenticatedError(f"it was signed for {fields['key']}", field="token")
    if not 0 <= fields["until_ms"] - now_ms <= 1000 * LEASE_TTL_S + 2 * _SLACK_MS:
        raise UnauthenticatedError("it is an old one", field="token")
    return fields, int(fields["until_ms"])


class RedisPresence:
    """Keeps a key until :meth:`stop`, and tells in a stream when it comes and goes.

    Args:
        url: Where Redis is.
        key: Of whoever registers.
        value: What others are told.
        token: The services', which signs it; ``None``: there is none.
        news: Key of the stream.
        name: Who this is, in the stream.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """

    def __init__(
        self, url: str, *, key: str, value: Mapping[str, str], token: Token | None, news: str, name: str
    ) -> None:
        self._redis = open_redis(url)
        self._key = key
        self._value = dict(value)
        self._token = token
        self._news = news
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._known = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="registration redis")

    async def stop(self) -> None:
        """Take the key away and tell."""
        if self._task is not None:
            await end_task(self._task)
        with contextlib.suppress(*redis_errors()):  # the key's time ends it
            if self._known:
                await self._redis.delete(self._key)
                await self._tell("left")
        await self._redis.aclose()

    async def _run(self) -> None:
        absence = Absence(log, "Redis answers again")
        while True:
            try:
                now_ms = await redis_ms(self._redis) if self._token is not None else 0
                value = sign_registration(self._token, self._key, self._value, now_ms)
                before = await self._redis.set(self._key, value, px=int(1000 * LEASE_TTL_S), get=True)
                if before is None:
                    await self._tell("came")
                    log.info("registered with Redis")
                absence.ended()
                self._known = True
                pause_s = LEASE_TTL_S / 3
            except redis_errors() as error:
                absence.failed("Redis is away: %s", error)
                pause_s = _RETRY_S
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.0))

    async def _tell(self, what: str) -> None:
        await self._redis.xadd(self._news, {"instance": self._name, "what": what}, maxlen=NEWS_LENGTH, approximate=True)


def redis_store_node(url: str, prefix: str, name: str, address: str, token: Token | None) -> RedisPresence:
    """Return what makes a KV store node known to its clients.

    Args:
        url: Where Redis is.
        prefix: Put before every key.
        name: Of the node.
        address: ``host:port`` under which clients reach it. It also decides what the node keeps, so a node that is
            started again should have the same.
        token: The services', which signs it; ``None``: there is none.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """
    key = store_node_key(prefix, name)
    news = store_news_key(prefix)
    return RedisPresence(url, key=key, value={"address": address}, token=token, news=news, name=name)
