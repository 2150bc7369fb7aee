"""A fake router for tests of programs that use the SDK.

::

    from baton.testing import FakeRouter

    def test_summaries():
        with FakeRouter(lambda request: "short") as router, baton.Client(router.address) as client:
            assert summarize(client, "a long text") == "short"
        assert router.requests[0].prompt == "a long text"

It speaks the real protocol over a local connection, so that streams, errors, cancellation and time-outs are the SDK's
own. It has no model and no instances.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from baton.api.v1 import common_pb2, router_pb2, router_pb2_grpc
from baton.errors import BatonError, NotFoundError, UnavailableError
from baton.rpc.convert import finish_to_pb
from baton.rpc.server import GrpcServer
from baton.types import FinishReason

_SERVICE = "baton.api.v1.RouterService"
_START_S = 30.0


@dataclass(frozen=True)
class Asked:
    """A request that the router received.

    Attributes:
        prompt: Text, token ids, or messages with role and content.
        model: Name of the model; empty if the request has none.
        max_tokens: Most tokens to generate; ``None`` without a limit.
        temperature: Sampling temperature.
        seed: Seed of the random numbers; ``None`` without one.
        stop: Stop strings.
        message: The whole message.
    """

    prompt: str | list[int] | list[dict[str, str]]
    model: str
    max_tokens: int | None
    temperature: float
    seed: int | None
    stop: tuple[str, ...]
    message: router_pb2.RouterGenerateRequest = field(repr=False)


Reply = str | Sequence[str] | BatonError
"""Reply to a request: a text, its pieces (one message each), or an error."""


class FakeRouter:
    """A router with given replies, in a thread of its own. Use it as a context manager.

    Args:
        reply: Reply to all requests, or a function that makes it of a request; called in the router's thread.
        model: Name of the model that the router reports.

    Attributes:
        address: ``host:port``, for :class:`baton.Client`.
        requests: Requests received so far, in order.
    """

    def __init__(self, reply: Reply | Callable[[Asked], Reply] = "", *, model: str = "fake") -> None:
        self.requests: list[Asked] = []
        self.address = ""
        self._servicer = _Servicer(self.requests, reply, model)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fake router", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(_START_S) or self._error is not None:
            raise UnavailableError(f"the fake router did not start: {self._error or 'time is up'}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(_START_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = GrpcServer(host="127.0.0.1", port=0, services=[_SERVICE])
        router_pb2_grpc.add_RouterServiceServicer_to_server(self._servicer, server.server)
        self.address = f"127.0.0.1:{await server.start()}"
        self._started.set()
        await self._ending.wait()
        await server.stop(0)


class _Servicer(router_pb2_grpc.RouterServiceServicer):
    def __init__(self, requests: list[Asked], reply: Reply | Callable[[Asked], Reply], model: str) -> None:
        self._requests = requests
        self._reply = reply
        self._model = model

    async def Generate(
        self, request: router_pb2.RouterGenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.RouterGenerateResponse]:
        asked = _read(request)
        self._requests.append(asked)
        reply = self._reply(asked) if callable(self._reply) else self._reply
        if isinstance(reply, BatonError):
            raise reply
        pieces = [reply] if isinstance(reply, str) else list(reply)
        yield router_pb2.RouterGenerateResponse(
            request_id=request.request_id or f"fake-{len(self._requests)}",
            decision=router_pb2.RouteDecision(decode_instance="fake", policy="fake"),
        )
        count = request.sampling.n or 1
        for number, piece in enumerate(pieces or [""], 1):
            end = finish_to_pb(FinishReason.STOP if number >= len(pieces) else None)
            deltas = [
                router_pb2.TextDelta(index=i, text=piece, token_ids=[number], finish_reason=end) for i in range(count)
            ]
            yield router_pb2.RouterGenerateResponse(deltas=deltas)

    async def Route(self, request: router_pb2.RouteRequest, context: Any) -> router_pb2.RouteResponse:
        return router_pb2.RouteResponse(decision=router_pb2.RouteDecision(decode_instance="fake", policy="fake"))

    async def ListModels(self, request: router_pb2.ListModelsRequest, context: Any) -> router_pb2.ListModelsResponse:
        model = router_pb2.ModelDescription(name=self._model, max_model_len=4096, vocab_size=2**16)
        return router_pb2.ListModelsResponse(models=[model])

    async def NoteDirect(self, request: router_pb2.NoteDirectRequest, context: Any) -> router_pb2.NoteDirectResponse:
        return router_pb2.NoteDirectResponse()

    async def Register(self, request: router_pb2.RegisterRequest, context: Any) -> router_pb2.RegisterResponse:
        raise UnavailableError("a fake router has no instances")

    async def Heartbeat(self, request: router_pb2.HeartbeatRequest, context: Any) -> router_pb2.HeartbeatResponse:
        return router_pb2.HeartbeatResponse()

    async def Deregister(self, request: router_pb2.DeregisterRequest, context: Any) -> router_pb2.DeregisterResponse:
        return router_pb2.DeregisterResponse()

    async def ListInstances(
        self, request: router_pb2.ListInstancesRequest, context: Any
    ) -> router_pb2.ListInstancesResponse:
        item = router_pb2.InstanceStatus(instance_id="fake", role=common_pb2.ROLE_DECODE, healthy=True)
        return router_pb2.ListInstancesResponse(instances=[item])

    async def GetStats(self, request: router_pb2.GetStatsRequest, context: Any) -> router_pb2.GetStatsResponse:
        return router_pb2.GetStatsResponse(window_s=request.window_s)

    async def Explain(self, request: router_pb2.ExplainRequest, context: Any) -> router_pb2.ExplainResponse:
        raise NotFoundError(f"no decision of {request.request_id!r} is remembered", field="request_id")


def _read(request: router_pb2.RouterGenerateRequest) -> Asked:
    kind = request.WhichOneof("prompt")
    sampling = request.sampling
    prompt: str | list[int] | list[dict[str, str]] = request.text
    if kind == "token_ids":
        prompt = list(request.token_ids.ids)
    elif kind == "chat":
        prompt = [{"role": item.role, "content": item.content} for item in request.chat.messages]
    return Asked(
        prompt,
        request.model,
        sampling.max_tokens if sampling.HasField("max_tokens") else None,
        sampling.temperature,
        sampling.seed if sampling.HasField("seed") else None,
        tuple(request.stop),
        request,
    )
