"""Instances behind a Kubernetes Service: its EndpointSlices, listed once and then watched.

A watch begins where the list or the last event was (``resourceVersion``; bookmarks move it on while nothing happens). A
stream that breaks is opened again from there; 410 Gone means that the server remembers no more, so everything is
listed anew. While the API server is away, what is known stays.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Mapping
from typing import Any

import grpc.aio
import httpx
import orjson

from baton.api.v1 import worker_pb2, worker_pb2_grpc
from baton.config.router import RouterConfig
from baton.errors import ConfigError, InvalidRequestError
from baton.logs import Absence
from baton.rpc.channel import Backoff, open_channel
from baton.rpc.convert import role_from_pb
from baton.rpc.errors import readable
from baton.rpc.kubernetes_api import KubernetesApi
from baton.rpc.service_token import Token
from baton.rpc.tls import Tls
from baton.types import Role
from baton_router.registry.registry import Registry

log = logging.getLogger(__name__)

SOURCE = "kubernetes"
_PAGE = 500
_WATCH_S = 290
_SILENCE_S = 310.0
_LONGEST_PAUSE_S = 5.0
_GONE = 410
_LONGEST_ROLE_PAUSE_S = 2.0
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, httpx.InvalidURL)
"""What reading JSON of another shape than the API's raises; a version that fits into no URL makes none."""
UNANSWERED = (httpx.HTTPError, ConfigError, *UNREADABLE)
"""What is raised where the API server gives no answer, or one that makes no sense."""


class GoneError(Exception):
    """The server remembers no more what came after a resource version."""


class KubernetesDiscovery:
    """Watches EndpointSlices.

    Args:
        config: Selector, port, namespace and where the API server is.
        registry: Is told.
        token: Shared token to show to instances.
        tls: Certificates, if the services use some.

    Raises:
        ConfigError: The service account's files are not there, or this is no pod and no API server was named.
    """

    def __init__(self, config: RouterConfig, registry: Registry, token: Token | None, tls: Tls | None = None) -> None:
        self._api = KubernetesApi(config.kubernetes_api, config.kubernetes_account, config.kubernetes_namespace)
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{self._api.namespace}/endpointslices"
        self._selector = config.kubernetes_selector
        self._registry = registry
        self._slices = Slices(config.kubernetes_port)
        self._roles = RoleFinder(SOURCE, registry, token, config.probe_timeout_s, tls)
        self._version = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch; needs a running loop."""
        self._task = asyncio.create_task(self._run(), name="discovery kubernetes")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._roles.close()
        await self._api.close()

    async def _run(self) -> None:
        backoff = Backoff(_LONGEST_PAUSE_S, random.Random())
        absence = Absence(log, "Kubernetes answers again")
        while True:
            try:
                if not self._version:
                    await self._list()
                    absence.ended()
                await self._watch(backoff)
                absence.ended()
            except GoneError:
                log.info("Kubernetes: too old a resource version, listing anew")
                self._version = ""
            except UNANSWERED as error:
                if isinstance(error, UNREADABLE):
                    self._version = ""  # half of it may have been taken
                told = "Kubernetes does not answer, the instances found so far are kept: %s: %s"
                absence.failed(told, type(error).__name__, error)
                self._registry.discovery_failed(SOURCE)
            await asyncio.sleep(backoff.next_s())

    async def _list(self) -> None:
        items: list[Any] = []
        parameters: dict[str, str] = {"labelSelector": self._selector, "limit": str(_PAGE)}
        while True:
            answer = await self._api.http.get(self._path, params=parameters, headers=self._api.headers())
            if answer.status_code == _GONE:  # the list took too long to page through
                raise GoneError
            answer.raise_for_status()
            page = orjson.loads(answer.content)
            items += page.get("items") or ()
            more = page["metadata"].get("continue")
            if not more:
                break
            parameters["continue"] = more
        self._slices.replace(items)
        self._version = page["metadata"]["resourceVersion"]
        self._roles.found(self._slices.addresses())

    async def _watch(self, backoff: Backoff) -> None:
        """Follow changes until the stream ends.

        Raises:
            GoneError: Everything has to be listed anew.
        """
        parameters = {
            "labelSelector": self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(_WATCH_S),
        }
        timeout = httpx.Timeout(10.0, read=_SILENCE_S)
        async with self._api.http.stream(
            "GET", self._path, params=parameters, headers=self._api.headers(), timeout=timeout
        ) as answer:
            if answer.status_code == _GONE:
                raise GoneError
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line:
                    self._take(orjson.loads(line))
                    backoff.reset()

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        item = event["object"]
        if kind == "ERROR":
            if item.get("code") == _GONE:
                raise GoneError
            raise ValueError(f"the watch ended: {item.get('message')}")
        self._version = item["metadata"]["resourceVersion"]
        if kind != "BOOKMARK":
            self._slices.apply(kind, item)
            self._roles.found(self._slices.addresses())


class Slices:
    """The EndpointSlices of one selector, as list and watch tell of them.

    Args:
        port: Name of the port to take.
    """

    def __init__(self, port: str) -> None:
        self._port = port
        self._slices: dict[str, frozenset[str]] = {}

    def replace(self, items: Iterable[Mapping[str, Any]]) -> None:
        self._slices = {_slice_name(item): self._addresses(item) for item in items}

    def apply(self, kind: str, item: Mapping[str, Any]) -> None:
        """Take a change: ``ADDED``, ``MODIFIED`` or ``DELETED``."""
        if kind == "DELETED":
            self._slices.pop(_slice_name(item), None)
        else:
            self._slices[_slice_name(item)] = self._addresses(item)

    def addresses(self) -> set[str]:
        """Return every ``host:port`` that takes requests; a slice may repeat what another one has."""
        return set[str]().union(*self._slices.values())

    def _addresses(self, item: Mapping[str, Any]) -> frozenset[str]:
        port = next((x.get("port") for x in item.get("ports") or () if x.get("name") == self._port), None)
        if port is None:
            return frozenset()
        form = "[{}]:{}" if item.get("addressType") == "IPv6" else "{}:{}"
        return frozenset(
            form.format(address, port)
            for endpoint in item.get("endpoints") or ()
            if (endpoint.get("conditions") or {}).get("ready") is not False  # not said: ready
            for address in endpoint.get("addresses") or ()
        )


def _slice_name(item: Mapping[str, Any]) -> str:
    return str(item["metadata"]["name"])


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
        self, source: str, registry: Registry, token: Token | None, timeout_s: float, tls: Tls | None = None
    ) -> None:
        self._source = source
        self._registry = registry
        self._timeout_s = timeout_s
        self._token = token
        self._tls = tls
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
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tell(self) -> None:
        self._registry.found(self._source, self._roles)

    async def _ask(self, address: str) -> None:
        backoff = Backoff(_LONGEST_ROLE_PAUSE_S, random.Random())
        refused = False
        async with open_channel(address, token=self._token, tls=self._tls) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            while True:
                try:
                    info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=self._timeout_s)
                    self._roles[address] = role_from_pb(readable(info).role)
                    break
                except (grpc.aio.AioRpcError, InvalidRequestError) as error:
                    denied = isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED
                    level = logging.WARNING if denied and not refused else logging.DEBUG  # once, not once per try
                    log.log(level, "%s does not say what it is yet: %s", address, error)
                    refused = denied
                await asyncio.sleep(backoff.next_s())
        self._asking.pop(address, None)
        self._tell()
