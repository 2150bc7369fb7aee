"""Making an instance known to its routers, or through Redis, and keeping it known."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass

import grpc.aio

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.rpc.channel import open_channel
from baton.rpc.convert import role_to_pb
from baton.rpc.redis_client import (
    LEASE_TTL_S,
    NEWS_LENGTH,
    end_task,
    instance_key,
    news_key,
    open_redis,
    redis_errors,
    store_news_key,
    store_node_key,
)
from baton.rpc.tls import Tls
from baton.types import Epoch, InstanceId, Role

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 2.0
_REDIS_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Identity:
    """What a router is told."""

    address: str
    instance_id: InstanceId
    role: Role
    epoch: Epoch


class Registration:
    """Registers with one router and renews the lease until :meth:`stop`; registers anew when the router forgot.

    Args:
        router: Its gRPC address.
        identity: Who registers.
        token: Shared token, if the services use one.
        tls: Certificates, if they use some.
    """

    def __init__(self, router: str, identity: Identity, token: str | None, tls: Tls | None = None) -> None:
        self._router, self._identity, self._token, self._tls = router, identity, token, tls
        self._task: asyncio.Task[None] | None = None
        self._lease_id = ""
        self._interval = FIRST_BACKOFF_S

    def start(self) -> None:
        """Begin in the background."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"registration {self._router}")

    async def stop(self) -> None:
        """Stop renewing and tell the router."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._lease_id:
            return
        async with open_channel(self._router, token=self._token, tls=self._tls) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            try:
                await stub.Deregister(router_pb2.DeregisterRequest(lease_id=self._lease_id), timeout=1.0)
            except grpc.aio.AioRpcError as error:
                log.info("router %s did not hear the goodbye: %s", self._router, error.code().name)

    async def _run(self) -> None:
        backoff, away = FIRST_BACKOFF_S, False
        async with open_channel(self._router, token=self._token, tls=self._tls) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            while True:
                try:
                    interval = await self._renew(stub)
                    backoff, away = FIRST_BACKOFF_S, False
                except grpc.aio.AioRpcError as error:
                    level = logging.DEBUG if away else logging.WARNING  # once per absence, not once per try
                    log.log(level, "router %s is away: %s %s", self._router, error.code().name, error.details())
                    away = True
                    interval, backoff = backoff, min(2 * backoff, LAST_BACKOFF_S)
                # Jitter keeps a fleet from calling in step after a router's restart.
                await asyncio.sleep(interval * random.uniform(0.8, 1.0))

    async def _renew(self, stub: router_pb2_grpc.RouterServiceAsyncStub) -> float:
        """Heartbeat or register; returns seconds until the next one is due."""
        if self._lease_id:
            beat = await stub.Heartbeat(router_pb2.HeartbeatRequest(lease_id=self._lease_id), timeout=CALL_TIMEOUT_S)
            if beat.known:
                return self._interval
            log.info("router %s forgot this instance: registering again", self._router)
        who = self._identity
        answer = await stub.Register(
            router_pb2.RegisterRequest(
                address=who.address, instance_id=who.instance_id, role=role_to_pb(who.role), epoch=who.epoch
            ),
            timeout=CALL_TIMEOUT_S,
        )
        self._lease_id = answer.lease_id
        self._interval = answer.ttl_ms / 3000
        log.info("registered with router %s", self._router)
        return self._interval


class RedisPresence:
    """Keeps a key until :meth:`stop`, and tells in a stream when it comes and goes.

    Args:
        url: Where Redis is.
        key: Of whoever registers.
        value: What others are told.
        news: Key of the stream.
        name: Who this is, in the stream.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """

    def __init__(self, url: str, *, key: str, value: Mapping[str, str], news: str, name: str) -> None:
        self._redis = open_redis(url)
        self._key, self._value, self._news, self._name = key, json.dumps(dict(value)), news, name
        self._task: asyncio.Task[None] | None = None
        self._known = False

    def start(self) -> None:
        """Begin in the background."""
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
        away = False
        while True:
            try:
                before = await self._redis.set(self._key, self._value, px=int(1000 * LEASE_TTL_S), get=True)
                if before is None:
                    await self._tell("came")
                    log.info("registered with Redis")
                self._known, away, pause_s = True, False, LEASE_TTL_S / 3
            except redis_errors() as error:
                # Once per absence, not once per try.
                log.log(logging.DEBUG if away else logging.WARNING, "Redis is away: %s", error)
                away, pause_s = True, _REDIS_RETRY_S
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.0))

    async def _tell(self, what: str) -> None:
        await self._redis.xadd(self._news, {"instance": self._name, "what": what}, maxlen=NEWS_LENGTH, approximate=True)


class RedisRegistration(RedisPresence):
    """Makes an instance known to routers.

    Args:
        url: Where Redis is.
        prefix: Put before every key.
        identity: Who registers.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """

    def __init__(self, url: str, prefix: str, identity: Identity) -> None:
        super().__init__(
            url,
            key=instance_key(prefix, identity.instance_id),
            value={"address": identity.address, "role": identity.role.value, "epoch": identity.epoch.hex()},
            news=news_key(prefix),
            name=str(identity.instance_id),
        )


class RedisNode(RedisPresence):
    """Makes a KV store node known to its clients.

    Args:
        url: Where Redis is.
        prefix: Put before every key.
        name: Of the node.
        address: ``host:port`` under which clients reach it. It also decides what the node keeps, so a node that is
            started again should have the same.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """

    def __init__(self, url: str, prefix: str, name: str, address: str) -> None:
        key, news = store_node_key(prefix, name), store_news_key(prefix)
        super().__init__(url, key=key, value={"address": address}, news=news, name=name)
