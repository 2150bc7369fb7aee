"""Making an instance known to its routers, or through Redis, and keeping it known."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass

import grpc.aio

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.logs import Absence
from baton.rpc.channel import open_channel
from baton.rpc.convert import role_to_pb
from baton.rpc.errors import readable
from baton.rpc.redis import RedisPresence, instance_key, news_key
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls
from baton.types import Epoch, InstanceId, Role

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 2.0


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

    def __init__(self, router: str, identity: Identity, token: Token | None, tls: Tls | None = None) -> None:
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
        backoff, absence = FIRST_BACKOFF_S, Absence(log, "router %s answers again", self._router)
        async with open_channel(self._router, token=self._token, tls=self._tls) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            while True:
                try:
                    interval = await self._renew(stub)
                    absence.ended()
                    backoff = FIRST_BACKOFF_S
                except grpc.aio.AioRpcError as error:
                    absence.failed("router %s is away: %s %s", self._router, error.code().name, error.details())
                    interval, backoff = backoff, min(2 * backoff, LAST_BACKOFF_S)
                # Jitter keeps a fleet from calling in step after a router's restart.
                await asyncio.sleep(interval * random.uniform(0.8, 1.0))

    async def _renew(self, stub: router_pb2_grpc.RouterServiceAsyncStub) -> float:
        """Heartbeat or register; returns seconds until the next one is due."""
        if self._lease_id:
            beat = await stub.Heartbeat(router_pb2.HeartbeatRequest(lease_id=self._lease_id), timeout=CALL_TIMEOUT_S)
            if readable(beat).known:
                return self._interval
            log.info("router %s forgot this instance: registering again", self._router)
        who = self._identity
        answer = await stub.Register(
            router_pb2.RegisterRequest(
                address=who.address, instance_id=who.instance_id, role=role_to_pb(who.role), epoch=who.epoch
            ),
            timeout=CALL_TIMEOUT_S,
        )
        self._lease_id = readable(answer).lease_id
        self._interval = answer.ttl_ms / 3000
        log.info("registered with router %s", self._router)
        return self._interval


def redis_registration(url: str, prefix: str, identity: Identity, token: Token | None) -> RedisPresence:
    """Return what makes an instance known to routers.

    Args:
        url: Where Redis is.
        prefix: Put before every key.
        identity: Who registers.
        token: The services', which signs it; ``None``: there is none.

    Raises:
        ConfigError: The URL cannot be read, or the client is not installed.
    """
    return RedisPresence(
        url,
        key=instance_key(prefix, identity.instance_id),
        value={"address": identity.address, "role": identity.role.value, "epoch": identity.epoch.hex()},
        token=token,
        news=news_key(prefix),
        name=str(identity.instance_id),
    )
