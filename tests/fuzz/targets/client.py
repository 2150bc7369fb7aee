"""What the SDK reads from a server, through its own streams; and the proof of the token, with somebody in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from tests.fuzz.choices import Choices
from tests.fuzz.event_loops import event_loop
from tests.fuzz.targets.requests import filled
from tests.support.scripted import MODEL

from baton.api.v1 import auth_pb2, router_pb2, worker_pb2
from baton.client.async_stream import AsyncStream
from baton.client.direct import DirectCall
from baton.client.settings import Budget
from baton.client.types import read_decision, read_instance, read_model
from baton.errors import BatonError
from baton.rpc import proof as proofs
from baton.rpc.errors import DETAILS_KEY, status_code, status_details
from baton.rpc.service_token import Token
from baton.token_ids import pack_ids

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]
_STRANGE_ID = 2**32 - 1


def _failure(choices: Choices) -> grpc.aio.AioRpcError:
    more = grpc.aio.Metadata((DETAILS_KEY, choices.take(choices.number(0, 20))))
    return grpc.aio.AioRpcError(choices.pick([*grpc.StatusCode]), grpc.aio.Metadata(), more, "gone", None)


class _Call:
    """A call that is answered by what an input says, as gRPC hands it on: what cannot be read is ``None``."""

    def __init__(self, answers: list[Message | grpc.RpcError | None]) -> None:
        self._answers = iter(answers)

    async def read(self) -> Any:
        if isinstance(item := next(self._answers, _EOF), grpc.RpcError):
            raise item
        return item

    def __await__(self) -> Generator[Any, None, Any]:
        return self.read().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (item := await self.read()) is not _EOF:
            yield item

    def cancel(self) -> None:
        """Do nothing: it has nobody at its other end."""


def _answers(choices: Choices, make: Callable[[Choices], Message]) -> list[Message | grpc.RpcError | None]:
    out: list[Message | grpc.RpcError | None] = []
    for _ in range(choices.number(0, 6)):
        kind = choices.number(0, 31)
        message: Message | None = make(choices)
        if kind == 0:
            out.append(_failure(choices))
            break
        if kind == 1 and message is not None:
            try:
                message = type(message).FromString(choices.mutated(message.SerializeToString()))
            except DecodeError:
                message = None
        out.append(message)
    return out


def _ids(choices: Choices) -> list[int]:
    return [choices.number(0, 4100) if choices.number(0, 15) else _STRANGE_ID for _ in range(choices.number(0, 4))]


def _delta(choices: Choices, delta: Any) -> None:
    delta.index = choices.pick([0, 0, 0, 1, 1, 2, _STRANGE_ID])
    delta.token_ids.extend(_ids(choices))
    delta.finish_reason = choices.pick([0, 0, 0, 0, 1, 2, 3, 4, 9])
    if choices.number(0, 7) == 0:
        delta.logprobs.add(token_id=1, rank=1, top_token_ids=_ids(choices), top_logprobs=[-1.0] * choices.number(0, 4))


def _routed(choices: Choices) -> router_pb2.RouterGenerateResponse:
    message = router_pb2.RouterGenerateResponse()
    if choices.number(0, 15) == 0:
        filled(choices, message)
    for _ in range(choices.pick([1, 1, 2, 0])):
        _delta(choices, delta := message.deltas.add(text=choices.pick(["", "a", "é"])))
        delta.stop_reason = choices.pick(["", "", "x"])
    return message


def _generated(choices: Choices) -> worker_pb2.GenerateResponse:
    message = worker_pb2.GenerateResponse()
    if choices.number(0, 15) == 0:
        filled(choices, message)
    for _ in range(choices.pick([1, 1, 2, 0])):
        _delta(choices, delta := message.deltas.add())
        if choices.number(0, 7) == 0:
            delta.stop_token_id = choices.number(0, 4100)
    return message


def _placed(choices: Choices, asked: router_pb2.RouterGenerateRequest) -> router_pb2.RouteResponse:
    message = router_pb2.RouteResponse()
    request = message.direct.request
    message.direct.address, message.direct.model_path = "127.0.0.1:1", "m"
    request.request_id, request.sampling.seed = "r", 7
    request.sampling.n = choices.pick([asked.sampling.n] * 6 + [0, 3, _STRANGE_ID])
    request.sampling.max_tokens = choices.pick([1, 4, 100, 0, _STRANGE_ID])
    request.prompt_token_ids = pack_ids(_ids(choices)) + b"x" * (choices.number(0, 15) == 0)
    if choices.number(0, 15) == 0:
        filled(choices, message)
    return message


def answers(data: bytes) -> None:
    """Whatever a server answers, the caller has a generation or an error of Baton's."""
    choices = Choices(data)
    with contextlib.suppress(BatonError):
        event_loop(__name__).run_until_complete(_generate(choices))
    for kind, read in (
        (router_pb2.RouteDecision, read_decision),
        (router_pb2.InstanceStatus, read_instance),
        (router_pb2.ModelDescription, read_model),
    ):
        if not choices.more():
            break
        message: Any = filled(choices, kind())
        assert read(message) is not None


async def _generate(choices: Choices) -> None:
    request = router_pb2.RouterGenerateRequest(text="def", stop=["a", "日"][: choices.number(0, 2)])
    request.sampling.n = choices.number(1, 2)
    open_call: Callable[[float], Any]
    if choices.flag():
        call = _Call(_answers(choices, _routed))

        def open_call(timeout: float) -> _Call:
            return call
    else:
        placed = _Call([choices.pick([_placed(choices, request)] * 15 + [None]), _failure(choices)])
        router = SimpleNamespace(
            Route=lambda *_, **__: placed, Generate=lambda *_, **__: _Call(_answers(choices, _routed))
        )

        async def model(path: str) -> Any:
            return MODEL

        instance = SimpleNamespace(Generate=lambda *_, **__: _Call(_answers(choices, _generated)))
        links: Any = SimpleNamespace(
            router=router, metadata=(), model=model, decode=lambda _: instance, note=lambda note: note.ByteSize()
        )

        def open_call(timeout: float) -> DirectCall:
            return DirectCall(links, request, timeout)

    opening: Any = SimpleNamespace(open=open_call, request=request, resumes=False, failed=lambda: None)
    stream = AsyncStream(opening, Budget(60.0, 0))
    chunks = [chunk async for chunk in stream]
    result = stream.result()
    for index, choice in enumerate(result.choices):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert choice.text == "".join(chunk.text for chunk in own)
        assert choice.token_ids == [token_id for chunk in own for token_id in chunk.token_ids]
        assert choice.finish_reason is not None


# --- the proof of the token ---


class _Context:
    """Of a call as the service sees it."""

    def __init__(self, host: str) -> None:
        self._host = host

    def peer(self) -> str:
        return f"{self._host}:{id(self) % 50000}"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}


class _Between:
    """A channel on which somebody may change what is said."""

    def __init__(self, service: proofs.ProofServicer, choices: Choices, context: _Context) -> None:
        self._service, self._choices, self._context = service, choices, context
        self.changed = False

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        serve = getattr(self._service, method.rpartition("/")[2])
        kind = {"Challenge": auth_pb2.ChallengeRequest, "Prove": auth_pb2.ProveRequest}[method.rpartition("/")[2]]

        async def call(_: Message, metadata: Sequence[tuple[str, bytes]], **more: Any) -> Any:
            try:
                answer = await serve(self._passed(kind, dict(metadata)[proofs.REQUEST_KEY]), self._context)
            except BatonError as error:
                details = grpc.aio.Metadata((DETAILS_KEY, status_details(error)))
                code = status_code(error)
                raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), details, error.message, None) from None
            return self._passed(response_deserializer.__self__, answer.SerializeToString())

        return call

    def get_state(self) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, state: grpc.ChannelConnectivity) -> None:
        await asyncio.sleep(0)

    def _passed(self, kind: Any, data: bytes) -> Any:
        right = kind.FromString(data)
        if self._choices.number(0, 5) == 0:
            data = self._choices.mutated(data)
        try:
            message = kind.FromString(data)
        except DecodeError:
            message = None
            self.changed = True
            if kind in (auth_pb2.ChallengeRequest, auth_pb2.ProveRequest):  # gRPC's server answers that by itself
                raise _failure(self._choices) from None
        self.changed |= message is None or any(
            getattr(message, field.name) != getattr(right, field.name) for field in kind.DESCRIPTOR.fields
        )
        return message


def proof(data: bytes) -> None:
    """Both ends believe each other if they know the same token and nobody changed anything; else they say so."""
    event_loop(__name__).run_until_complete(_prove(Choices(data)))


async def _prove(choices: Choices) -> None:
    ours, theirs = Token("the token of this target"), Token("another one of this target")
    now, same = [1000.0], choices.number(0, 3) > 0
    service = proofs.ProofServicer(ours, lambda: now[0])
    between = _Between(service, choices, _Context("ipv4:10.0.0.1"))
    prover = proofs.Prover(ours if same else theirs, "service:1", b"")
    channel: Any = between
    prover.attach(channel)
    method = "/baton.api.v1.WorkerService/Generate"
    try:
        header = await prover.header(method, choices.pick([None, 0.5, 60.0]), choices.flag())
    except grpc.aio.AioRpcError:
        assert between.changed or not same
        await asyncio.sleep(0)
        return
    assert same
    assert not between.changed
    shown, asked, host = header, method, choices.pick(["ipv4:10.0.0.1"] * 3 + ["ipv4:10.0.0.2"])
    if choices.number(0, 2) == 0:
        shown = proofs.SCHEME + choices.mutated(header[len(proofs.SCHEME) :].encode()).decode("utf-8", "replace")
    if choices.number(0, 3) == 0:
        asked = choices.pick([method[:-1], method + "Many", "", "é\n"])
    now[0] += choices.pick([0.0, 0.0, 299.0, 301.0])
    right = (shown, asked, host) == (header, method, "ipv4:10.0.0.1") and now[0] < 1300.0
    try:
        service.check(asked, shown)(_Context(host))
    except BatonError:
        assert not right
    else:
        assert right
    await asyncio.sleep(0)
