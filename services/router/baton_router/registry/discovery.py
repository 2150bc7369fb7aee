"""Finding instances: beside those on the command line and those that register here, in Redis or in Kubernetes.

A source tells the registry which addresses there are (``Registry.set_discovered``). The monitor of each address asks
the instance for its identity, and refuses one that does not fit.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import grpc.aio
import httpx
import orjson

from baton.api.v1 import worker_pb2, worker_pb2_grpc
from baton.background import keep_running
from baton.config.router import RouterConfig, check_address
from baton.errors import ConfigError, InvalidRequestError
from baton.logs import Absence
from baton.rpc.channel import Backoff, open_channel
from baton.rpc.convert import role_from_pb
from baton.rpc.errors import call_unary
from baton.rpc.kubernetes_api import KubernetesApi
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
from baton.rpc.tls import Tls
from baton.types import Role
from baton_router.registry.registry import Registry

log = logging.getLogger(__name__)

REDIS = "redis"
KUBERNETES = "kubernetes"


class Discovery(Protocol):
    """A source of instances."""

    def start(self) -> None:
        """Begin to search; needs a running loop."""

    async def close(self) -> None: ...


def discoveries(config: RouterConfig, registry: Registry, token: Token | None, tls: Tls | None) -> list[Discovery]:
    """Return the sources that ``config.discover`` names.

    Raises:
        ConfigError: A source is not usable; names the field.
    """
    sources: list[Discovery] = []
    if REDIS in config.discover:
        sources.append(RedisDiscovery(config, registry, token))
    if KUBERNETES in config.discover:
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every request
        sources.append(KubernetesDiscovery(config, registry, token, tls))
    return sources


# --- Redis ---

_ROUND_S = 0.8


class RedisDiscovery:
    """Follows the instances that registered in Redis; each keeps a key with a time to live.

    Args:
        config: URL and key prefix of Redis.
        registry: Registry that gets the instances.
        token: Shared token of the services; with one, registrations that it has not signed are skipped.
        now: Monotonic clock, in seconds.

    Attributes:
        watch: Watch of the registrations.

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
            on_failure=partial(registry.discovery_failed, REDIS),
        )
        self._registry = registry
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = keep_running(partial(self.watch.run, self._report), "discovery redis")

    async def close(self) -> None:
        if self._task is not None:
            await cancel_task(self._task)
        await self._redis.aclose()

    def _report(self, instances: Collection[tuple[str, Role]]) -> None:
        self._registry.set_discovered(REDIS, dict(instances))


def _parse(fields: Mapping[str, Any]) -> tuple[str, Role]:
    check_address(fields["address"], field="address")
    return fields["address"], Role(fields["role"])


# --- Kubernetes ---

_PAGE = 500
_WATCH_S = 290
_SILENCE_S = 310.0
_LONGEST_PAUSE_S = 5.0
_GONE = 410
_LONGEST_ROLE_PAUSE_S = 2.0
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, httpx.InvalidURL)
"""Errors of reading JSON of another shape than the API's, or of a version that fits into no URL."""
UNANSWERED = (httpx.HTTPError, ConfigError, *UNREADABLE)
"""Errors of requests that the API server does not answer, or not sensibly."""


class GoneError(Exception):
    """The server no longer has the changes after a resource version."""


class KubernetesDiscovery:
    """Follows the instances behind a Kubernetes Service: its EndpointSlices, listed once and then watched.

    A watch begins at the version of the list or the last event (``resourceVersion``; bookmarks advance it while nothing
    happens). A broken stream is opened again from there; after 410 Gone everything is listed again. While the API
    server is away, known instances are kept.

    Args:
        config: Selector, port, namespace and address of the API server.
        registry: Registry that gets the instances.
        token: Shared token to prove to instances.
        tls: Certificates, if the services use TLS.

    Raises:
        ConfigError: The service account's files are missing, or this is no pod and no API server was named.
    """

    def __init__(self, config: RouterConfig, registry: Registry, token: Token | None, tls: Tls | None = None) -> None:
        self._api = KubernetesApi(config.kubernetes_api, config.kubernetes_account, config.kubernetes_namespace)
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{self._api.namespace}/endpointslices"
        self._selector = config.kubernetes_selector
        self._registry = registry
        self._slices = Slices(config.kubernetes_port)
        self._roles = RoleFinder(KUBERNETES, registry, token, config.probe_timeout_s, tls)
        self._version = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = keep_running(self._run, "discovery kubernetes")

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
                    absence.record_return()
                await self._watch(backoff)
                absence.record_return()
            except GoneError:
                log.info("Kubernetes: too old a resource version, listing again")
                self._version = ""
            except UNANSWERED as error:
                if isinstance(error, UNREADABLE):
                    self._version = ""  # a part of it may have been applied
                message = "Kubernetes does not answer, the instances found so far are kept: %s: %s"
                absence.record_failure(message, type(error).__name__, error)
                self._registry.discovery_failed(KUBERNETES)
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
        self._roles.set_addresses(self._slices.addresses())

    async def _watch(self, backoff: Backoff) -> None:
        """Follow changes until the stream ends.

        Raises:
            GoneError: Everything has to be listed again.
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
                    self._apply(orjson.loads(line))
                    backoff.reset()

    def _apply(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        item = event["object"]
        if kind == "ERROR":
            if item.get("code") == _GONE:
                raise GoneError
            raise ValueError(f"the watch ended: {item.get('message')}")
        self._version = item["metadata"]["resourceVersion"]
        if kind != "BOOKMARK":
            self._slices.apply(kind, item)
            self._roles.set_addresses(self._slices.addresses())


class Slices:
    """The EndpointSlices of one selector, from list and watch.

    Args:
        port: Name of the instances' port.
    """

    def __init__(self, port: str) -> None:
        self._port = port
        self._slices: dict[str, frozenset[str]] = {}

    def replace(self, items: Iterable[Mapping[str, Any]]) -> None:
        self._slices = {_slice_name(item): self._addresses(item) for item in items}

    def apply(self, kind: str, item: Mapping[str, Any]) -> None:
        """Apply a change: ``ADDED``, ``MODIFIED`` or ``DELETED``."""
        if kind == "DELETED":
            self._slices.pop(_slice_name(item), None)
        else:
            self._slices[_slice_name(item)] = self._addresses(item)

    def addresses(self) -> set[str]:
        """Return every ``host:port`` that accepts requests; slices may overlap."""
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
    """Asks the instances at some addresses for their roles, and reports them to the registry.

    Args:
        source: Name of the source of discovery.
        registry: Registry that gets the instances.
        token: Shared token to prove to instances.
        timeout_s: Timeout of one question, in seconds.
        tls: Certificates, if the services use TLS.
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

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Set the current addresses."""
        wanted = set(addresses)
        for address in [x for x in self._asking if x not in wanted]:
            self._asking.pop(address).cancel()
        self._roles = {address: role for address, role in self._roles.items() if address in wanted}
        for address in wanted - self._roles.keys() - self._asking.keys():
            self._asking[address] = keep_running(partial(self._ask, address), "role of", detail=address)
        self._report()

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _report(self) -> None:
        self._registry.set_discovered(self._source, self._roles)

    async def _ask(self, address: str) -> None:
        backoff = Backoff(_LONGEST_ROLE_PAUSE_S, random.Random())
        refused = False
        async with open_channel(address, token=self._token, tls=self._tls) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            while True:
                try:
                    info = await call_unary(stub.GetInfo, worker_pb2.GetInfoRequest(), timeout=self._timeout_s)
                    self._roles[address] = role_from_pb(info.role)
                    break
                except (grpc.aio.AioRpcError, InvalidRequestError) as error:
                    denied = isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED
                    level = logging.WARNING if denied and not refused else logging.DEBUG  # once, not once per try
                    log.log(level, "%s does not say what it is yet: %s", address, error)
                    refused = denied
                await asyncio.sleep(backoff.next_s())
        self._asking.pop(address, None)
        self._report()
