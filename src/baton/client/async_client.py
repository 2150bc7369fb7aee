"""The asynchronous client, which the synchronous one drives too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import grpc
import grpc.aio

from baton.api.v1 import router_pb2
from baton.client import admin, forks, scaling
from baton.client.async_stream import AsyncStream, task_is_cancelled, wait_for_event
from baton.client.direct import DirectCall, DirectLinks
from baton.client.mapping import map_bounded
from baton.client.request import Options, Prompt, build_generate, build_metadata, build_route, check_messages
from baton.client.routers import Opening, Routers
from baton.client.settings import CLOSED, DEFAULT_RETRIES, DEFAULT_TIMEOUT_S, RNG, Settings, check_timeout
from baton.client.structured import read_structured
from baton.client.types import (
    Generation,
    Instance,
    Model,
    RouteDecision,
    Stats,
    read_decision,
    read_instance,
    read_model,
    read_stats,
)
from baton.errors import BatonError, InvalidRequestError, UnavailableError
from baton.rpc.channel import check_health, open_channel
from baton.rpc.errors import readable
from baton.rpc.service_token import read_token
from baton.rpc.tls import Tls
from baton.types import Role


class AsyncClient:
    """Speaks to a Baton router over gRPC, from one event loop.

    Args, time-outs, retries and errors are those of :class:`baton.Client`. The connection is made with the first call.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:8001",
        *,
        token: str | None = None,
        token_file: str = "",
        timeout: float = DEFAULT_TIMEOUT_S,
        retries: int = DEFAULT_RETRIES,
        direct: bool = False,
        tokenizer: str = "",
        tls: Tls | None = None,
    ) -> None:
        addresses = (address,) if isinstance(address, str) else tuple(address)
        self._settings = Settings(addresses, token, timeout, retries)
        if token is not None and token_file:
            raise InvalidRequestError("token is an API key: give it or token_file", field="token_file")
        self._service_token = read_token(token_file)
        self._tls, self._is_direct, self._tokenizer = tls, direct, tokenizer
        self._direct: DirectLinks | None = None
        self._routers = Routers(addresses, self._service_token, tls)
        self._is_connected = False
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()
        self._closing = asyncio.Event()

    @overload
    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        stream: Literal[False] = False,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        stream: Literal[True],
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream: ...

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        stream: bool = False,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Generation | AsyncStream:
        """Generate from a prompt; see :meth:`baton.Client.generate`.

        With ``stream=True`` the awaited result is an asynchronous iterator of chunks.
        """
        request = build_generate(prompt, model, options)
        if self._routers.several and not request.sampling.HasField("seed"):
            request.sampling.seed = RNG.getrandbits(32)  # so that another router can go on with what was drawn
        opening = self._open_generate(request, build_metadata(options))
        _, parse = read_structured(options)
        answer = AsyncStream(opening, request.sampling.n, self._settings.budget(timeout), parse)
        self._streams.add(answer)
        return answer if stream else await answer.collect()

    async def route(
        self, prompt: Prompt, *, model: str = "", cache_salt: str = "", timeout: float | None = None
    ) -> RouteDecision:
        """Ask where a prompt would go, and why; nothing is reserved."""
        request = build_route(prompt, model, cache_salt)
        return read_decision((await self._unary("Route", request, timeout)).decision)

    async def list_instances(self, *, timeout: float | None = None) -> list[Instance]:
        """Return every instance that the router knows."""
        response = await self._unary("ListInstances", router_pb2.ListInstancesRequest(), timeout)
        return [read_instance(item) for item in response.instances]

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the models that requests can name."""
        response = await self._unary("ListModels", router_pb2.ListModelsRequest(), timeout)
        return [read_model(item) for item in response.models]

    async def stats(self, *, window: float = 60.0, timeout: float | None = None) -> Stats:
        """Return how requests fared in the last seconds; see :meth:`baton.Client.stats`."""
        return read_stats(await self._unary("GetStats", router_pb2.GetStatsRequest(window_s=window), timeout))

    async def explain(self, request_id: str, *, timeout: float | None = None) -> dict[str, Any]:
        """Return why a request went where it went; see :meth:`baton.Client.explain`."""
        answer = await self._unary("Explain", router_pb2.ExplainRequest(request_id=request_id), timeout)
        found: dict[str, Any] = json.loads(answer.json)
        return found

    async def health(self, *, timeout: float = 2.0) -> dict[str, bool]:
        """Return which routers serve; see :meth:`baton.Client.health`."""
        check_timeout(timeout)
        self._connect()
        addresses = self._settings.addresses
        found = await asyncio.gather(*(check_health(x, timeout_s=timeout, tls=self._tls) for x in addresses))
        return dict(zip(addresses, found, strict=True))

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Answer a conversation; see :meth:`baton.Client.chat`."""
        return await self.generate(check_messages(messages), model=model, timeout=timeout, **options)

    async def map(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = 16,
        keep_errors: bool = False,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Generation | BatonError, None]:
        """Answer many prompts, some at a time; see :meth:`baton.Client.map`. An asynchronous iterator."""

        async def ask(prompt: Prompt) -> Generation:
            return await self.generate(prompt, model=model, timeout=timeout, **options)

        async with contextlib.aclosing(map_bounded(ask, prompts, concurrency, keep_errors=keep_errors)) as answers:
            async for answer in answers:
                yield answer

    async def drain(self, instance: str, *, wait: float = 60.0, migrate: bool = False) -> int:
        """Have an instance take no new requests; see :meth:`baton.Client.drain`."""
        found = admin.find(await self.list_instances(), instance)
        return await admin.drain(self._open_instance, found.address, wait, migrate=migrate)

    async def set_role(self, instance: str, role: Role) -> None:
        """Make an idle instance one of another role; see :meth:`baton.Client.set_role`."""
        found = admin.find(await self.list_instances(), instance)
        await admin.set_role(self._open_instance, found.address, Role(role))

    async def scale(
        self, *, prefill: int | None = None, decode: int | None = None, wait: float = 30.0, dry_run: bool = False
    ) -> list[scaling.Switch]:
        """Have instances change their roles, while requests run; see :meth:`baton.Client.scale`."""
        given = {Role.PREFILL: prefill, Role.DECODE: decode}
        targets = {role: count for role, count in given.items() if count is not None}
        switches = scaling.plan_switches(await self.list_instances(), targets)
        for each in () if dry_run else switches:
            await scaling.switch(self, each, wait)
        return switches

    async def close(self) -> None:
        """End every call and the connection."""
        self._closing.set()
        for stream in list(self._streams):
            stream.abort()
        if self._direct is not None:
            await self._direct.close()
        await self._routers.close()
        # gRPC keeps what it shares between event loops while channels are referred to: see _connect.
        self._direct = None
        forks.closed(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _open_generate(
        self, request: router_pb2.RouterGenerateRequest, metadata: tuple[tuple[str, str], ...]
    ) -> Opening:
        if not self._is_direct:
            return self._opening("Generate", request, metadata)

        def call(stub: Callable[[], Any], request: Any, timeout: float) -> DirectCall:
            self._connect()
            if self._direct is None:
                self._direct = DirectLinks(stub(), self._open_ticketed, self._settings.metadata, self._tokenizer)
            self._direct.router = stub()
            return DirectCall(self._direct, request, timeout, metadata)

        return Opening(self._routers, call, request)

    def _opening(self, name: str, request: Any, more: tuple[tuple[str, str], ...] = ()) -> Opening:
        metadata = self._settings.metadata + more

        def call(stub: Callable[[], Any], request: Any, timeout: float) -> Any:
            self._connect()
            return getattr(stub(), name)(request, timeout=timeout, metadata=metadata)

        return Opening(self._routers, call, request)

    def _connect(self) -> None:
        if self._closing.is_set():
            raise UnavailableError(CLOSED)
        forks.check()
        if not self._is_connected:  # not in the constructor: channels belong to the loop they were made in
            self._is_connected = True
            forks.opened(self)

    def _open_ticketed(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, tls=self._tls)  # the ticket stands for the services' token

    def _open_instance(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, token=self._service_token, tls=self._tls)

    async def _unary(self, name: str, request: Any, timeout: float | None) -> Any:
        budget, opening = self._settings.budget(timeout), self._opening(name, request)
        while True:
            try:
                return readable(await opening.open(budget.remaining()))
            except grpc.RpcError as error:
                delay = budget.after(error)
                opening.failed()
                await wait_for_event(self._closing, delay)
            except asyncio.CancelledError:
                if task_is_cancelled():
                    raise
                raise UnavailableError(CLOSED) from None
