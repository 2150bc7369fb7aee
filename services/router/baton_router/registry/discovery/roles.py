"""Asks instances that were found by address alone which role they have."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable

import grpc.aio

from baton.api.v1 import worker_pb2, worker_pb2_grpc
from baton.errors import InvalidRequestError
from baton.rpc.channel import Backoff, open_channel
from baton.rpc.convert import role_from_pb
from baton.rpc.tls import Tls
from baton.types import Role
from baton_router.registry.registry import Registry

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 2.0


class RoleFinder:
    """Turns addresses into instances with a role, and tells the registry.

    Args:
        source: Name of the source of discovery.
        registry: Is told.
        token: Shared token to show to instances.
        tls: Certificates, if the services use some.
        timeout_s: For one question.
    """

    def __init__(
        self, source: str, registry: Registry, token: str | None, timeout_s: float, tls: Tls | None = None
    ) -> None:
        self._source, self._registry, self._timeout_s = source, registry, timeout_s
        self._token, self._tls = token, tls
        self._roles: dict[str, Role] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def found(self, addresses: Iterable[str]) -> None:
        """Take the addresses that there are now."""
        wanted = set(addresses)
        for address in [x for x in self._asking if x not in wanted]:
            self._asking.pop(address).cancel()
        self._roles = {address: role for address, role in self._roles.items() if address in wanted}
        for address in wanted - self._roles.keys() - self._asking.keys():
            self._asking[address] = asyncio.create_task(self._ask(address), name=f"role of {address}")
        self._tell()

    async def close(self) -> None:
        """Stop asking."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tell(self) -> None:
        self._registry.found(self._source, self._roles)

    async def _ask(self, address: str) -> None:
        backoff = Backoff(_LONGEST_PAUSE_S, random.Random())
        async with open_channel(address, token=self._token, tls=self._tls) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            while True:
                try:
                    info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=self._timeout_s)
                    self._roles[address] = role_from_pb(info.role)
                    break
                except (grpc.aio.AioRpcError, InvalidRequestError) as error:
                    log.debug("%s does not say what it is yet: %s", address, error)
                await asyncio.sleep(backoff.next_s())
        self._asking.pop(address, None)
        self._tell()
