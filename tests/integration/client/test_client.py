"""Both clients against a real gRPC server whose router answers from a script."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pydantic
import pytest

from baton import AsyncClient, Client
from baton.api.v1 import common_pb2, router_pb2, router_pb2_grpc
from baton.client import Chunk, Generation
from baton.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    QueueFullError,
    UnauthenticatedError,
    UnavailableError,
)
from baton.rpc.server import GrpcServer, free_port
from baton.rpc.service_token import Token, read_token
from baton.types import FinishReason, PrefillPath, Role


class Person(pydantic.BaseModel):
    name: str


Script = Callable[[router_pb2.RouterGenerateRequest], AsyncIterator[router_pb2.RouterGenerateResponse]]
WAIT_S = 240.0


def delta(text: str, *ids: int, index: int = 0, end: int = 0) -> router_pb2.TextDelta:
    return router_pb2.TextDelta(index=index, text=text, token_ids=ids, finish_reason=end)  # type: ignore[arg-type]


def message(*deltas: router_pb2.TextDelta, **fields: Any) -> router_pb2.RouterGenerateResponse:
    return router_pb2.RouterGenerateResponse(request_id="r-1", deltas=deltas, **fields)


STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH
_STRANGE = {"no-json": b"<html>", "list": b"[]", "deep": b'{"a": ' + b"[" * 100_000}
"""Explanations that no router gives, by the request."""


class ScriptedRouter(router_pb2_grpc.RouterServiceServicer):
    def __init__(self) -> None:
        self.script: Script = whole_answer
        self.requests: list[Any] = []
        self.calls = 0
        self.metadata: dict[str, str] = {}
        self.cancelled = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        self.calls += 1
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        try:
            async for item in self.script(request):
                yield item
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def Route(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        self.calls += 1
        if self.calls < 3:
            raise UnavailableError("not yet", retry_after_s=0.01)
        candidate = router_pb2.RouteCandidate(instance_id="d0", role=common_pb2.ROLE_DECODE, match_rate=0.5, score=0.25)
        decision = router_pb2.RouteDecision(
            decode_instance="d0", candidates=[candidate], policy="match", prefill_addresses=["a:1"]
        )
        return router_pb2.RouteResponse(decision=decision)

    async def ListInstances(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        load = common_pb2.LoadReport(num_running=2, draining=True)
        item = router_pb2.InstanceStatus(instance_id="p0", role=common_pb2.ROLE_PREFILL, healthy=True, load=load)
        return router_pb2.ListInstancesResponse(instances=[item])

    async def ListModels(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        item = router_pb2.ModelDescription(name="tiny", max_model_len=512, vocab_size=9, eos_token_ids=[2])
        return router_pb2.ListModelsResponse(models=[item])

    async def GetStats(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        times = router_pb2.Quantiles(p50=1.0, p90=2.0, p95=3.0, p99=4.0)
        return router_pb2.GetStatsResponse(window_s=request.window_s, num_waiting=7, ttft_ms=times)

    async def Explain(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        if request.request_id in _STRANGE:
            return router_pb2.ExplainResponse(json=_STRANGE[request.request_id])
        if request.request_id != "gen-1":
            raise NotFoundError("not remembered", field="request_id")
        return router_pb2.ExplainResponse(json=b'{"id": "gen-1", "why": ["it had all of it"]}')


async def whole_answer(request: router_pb2.RouterGenerateRequest) -> AsyncIterator[router_pb2.RouterGenerateResponse]:
    trace = common_pb2.RequestTrace(path=common_pb2.PREFILL_PATH_REMOTE, pipe="shm", failed_prefills=["p1: gone"])
    yield message(decision=router_pb2.RouteDecision(decode_instance="d0", prompt_tokens=3))
    logprob = common_pb2.TokenLogprob(token_id=1, logprob=-0.5, rank=1, top_token_ids=[1, 4], top_logprobs=[-0.5, -1.0])
    first = delta("he", 1)
    first.logprobs.append(logprob)
    yield message(first, delta("HE", 7, index=1))
    yield message(delta("llo", 2, 3, end=STOP))
    yield message(delta("Y", 8, index=1, end=LENGTH), trace=trace)


async def endless(request: router_pb2.RouterGenerateRequest) -> AsyncIterator[router_pb2.RouterGenerateResponse]:
    yield message(delta("a", 1))
    yield message(delta("b", 2))
    await asyncio.Event().wait()


@asynccontextmanager
async def router(*, token: Token | None = None) -> AsyncIterator[tuple[ScriptedRouter, str]]:
    server = GrpcServer(host="127.0.0.1", port=0, services=["baton.api.v1.RouterService"], token=token)
    servicer = ScriptedRouter()
    router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server.server)
    port = await server.start()
    await server.set_serving(True)
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


class Both:
    """One surface over both clients, so that every test below runs against each."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @asynccontextmanager
    async def connect(self, address: str | list[str], **options: Any) -> AsyncIterator[Both]:
        if self.kind == "async":
            async with AsyncClient(address, **options) as self.client:
                yield self
        else:
            with Client(address, **options) as self.client:  # type: ignore[assignment]
                yield self

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        method = getattr(self.client, name)
        if self.kind == "async":
            return await method(*args, **options)
        return await asyncio.to_thread(method, *args, **options)

    async def next(self, stream: Any) -> Chunk | None:
        if self.kind == "async":
            return await anext(stream, None)
        return await asyncio.to_thread(next, stream, None)

    async def rest(self, stream: Any) -> list[Chunk]:
        return [chunk async for chunk in stream] if self.kind == "async" else await asyncio.to_thread(list, stream)


@pytest.fixture(params=["sync", "async"])
def both(request: pytest.FixtureRequest) -> Both:
    return Both(request.param)


async def test_a_whole_answer(both: Both) -> None:
    async with router() as (servicer, address), both.connect(address) as client:
        answer: Generation = await client.call("generate", "hi", model="tiny", n=2, logprobs=2, temperature=0.0)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("hello", [1, 2, 3], FinishReason.STOP)
    assert answer.logprobs is not None
    assert answer.logprobs[0].top == ((1, -0.5), (4, -1.0))
    second = answer.choices[1]
    assert (second.text, second.token_ids, second.finish_reason) == ("HEY", [7, 8], FinishReason.LENGTH)
    assert answer.request_id == "r-1"
    assert answer.trace is not None
    assert answer.decision is not None
    assert (answer.trace.path, answer.trace.failed_prefills) == (PrefillPath.REMOTE, ("p1: gone",))
    assert answer.decision.decode_instance == "d0"
    assert servicer.requests[0].model == "tiny"
    assert servicer.requests[0].sampling.n == 2


@pytest.mark.parametrize("end", [STOP, LENGTH])
async def test_an_answer_by_a_schema_is_an_object(both: Both, end: int) -> None:
    async with router() as (servicer, address), both.connect(address) as client:

        async def person(request: router_pb2.RouterGenerateRequest) -> AsyncIterator[router_pb2.RouterGenerateResponse]:
            assert request.structured_outputs.json
            yield message(delta('{"name": ', 5))
            yield message(delta('"Bo"}', 6, end=end))

        servicer.script = person
        answer = await client.call("generate", "Who?", response_format=Person)
        assert answer.parsed == (Person(name="Bo") if end == STOP else None)
        plain = await client.call("generate", "Who?", structured_outputs={"json": {"type": "object"}})
        assert plain.parsed == ({"name": "Bo"} if end == STOP else None)


async def test_a_stream_gives_chunks_and_then_its_trace(both: Both) -> None:
    async with router() as (_, address), both.connect(address) as client:
        stream = await client.call("generate", [5, 6], stream=True, n=2)
        first = await client.next(stream)
        assert first is not None
        assert (first.index, first.text, first.token_ids) == (0, "he", (1,))
        assert stream.decision.prompt_tokens == 3
        rest = await client.rest(stream)
        assert [(c.index, c.text) for c in rest] == [(1, "HE"), (0, "llo"), (1, "Y")]
        assert stream.trace.pipe == "shm"
        assert await client.next(stream) is None


async def test_cancel_reaches_the_server(both: Both) -> None:
    async with router() as (servicer, address), both.connect(address) as client:
        servicer.script = endless
        stream = await client.call("generate", "hi", stream=True)
        assert await client.next(stream) is not None
        stream.cancel()
        await asyncio.wait_for(servicer.cancelled.wait(), WAIT_S)
        assert len(await client.rest(stream)) <= 1


async def test_cancel_while_somebody_reads_ends_the_iteration(both: Both) -> None:
    async with router() as (servicer, address), both.connect(address) as client:
        servicer.script = endless
        stream = await client.call("generate", "hi", stream=True)
        await client.next(stream)
        await client.next(stream)
        reader = asyncio.create_task(client.next(stream))
        done, _ = await asyncio.wait([reader], timeout=0.05)
        assert not done
        stream.cancel()
        assert await asyncio.wait_for(reader, WAIT_S) is None


async def test_leaving_the_block_cancels() -> None:
    async with router() as (servicer, address):
        servicer.script = endless
        async with AsyncClient(address) as client:
            async with await client.generate("hi", stream=True) as stream:
                async for _ in stream:
                    break
            await asyncio.wait_for(servicer.cancelled.wait(), WAIT_S)


async def test_leaving_the_block_cancels_sync() -> None:
    async with router() as (servicer, address):
        servicer.script = endless

        def use() -> None:
            with client.generate("hi", stream=True) as stream:
                for _ in stream:
                    break

        with Client(address) as client:
            await asyncio.to_thread(use)
            await asyncio.wait_for(servicer.cancelled.wait(), WAIT_S)


async def test_a_dropped_stream_cancels(both: Both) -> None:
    async with router() as (servicer, address), both.connect(address) as client:
        servicer.script = endless
        stream = await client.call("generate", "hi", stream=True)
        await client.next(stream)
        del stream
        gc.collect()
        await asyncio.wait_for(servicer.cancelled.wait(), WAIT_S)


async def test_a_cancelled_task_cancels_the_request() -> None:
    async with router() as (servicer, address), AsyncClient(address) as client:
        servicer.script = endless
        task = asyncio.create_task(client.generate("hi"))
        while not servicer.calls:
            await asyncio.wait([task], timeout=0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(servicer.cancelled.wait(), WAIT_S)


async def test_the_deadline_holds_and_reaches_the_server(both: Both) -> None:
    async with router() as (servicer, address), both.connect(address) as client:
        await client.call("models")  # is connected now
        servicer.script = endless
        with pytest.raises(DeadlineError):
            await client.call("generate", "hi", timeout=2.0)
        await asyncio.wait_for(servicer.cancelled.wait(), WAIT_S)


async def test_errors_come_back_as_they_were_raised(both: Both) -> None:
    async def refuse(request: Any) -> AsyncIterator[Any]:
        errors = {
            "field": InvalidRequestError("too long", field="prompt"),
            "model": NotFoundError("no such model", field="model"),
            "full": QueueFullError("full", retry_after_s=1.5),
        }
        raise errors[request.text]
        yield

    async with router() as (servicer, address), both.connect(address) as client:
        servicer.script = refuse
        with pytest.raises(InvalidRequestError, match="too long") as invalid:
            await client.call("generate", "field")
        assert invalid.value.field == "prompt"
        with pytest.raises(NotFoundError):
            await client.call("generate", "model")
        with pytest.raises(QueueFullError) as full:
            await client.call("generate", "full")
        assert full.value.retry_after_s == 1.5
        assert servicer.calls == 3


async def test_unavailable_is_tried_again_before_the_first_token(both: Both) -> None:
    async def second_time(request: Any) -> AsyncIterator[Any]:
        yield message(decision=router_pb2.RouteDecision(decode_instance=f"d{servicer.calls}"))
        if servicer.calls == 1:
            raise UnavailableError("no decode instance", retry_after_s=0.01)
        yield message(delta("ok", 1, end=STOP))

    async with router() as (servicer, address), both.connect(address) as client:
        servicer.script = second_time
        answer = await client.call("generate", "hi")
    assert (answer.text, answer.decision.decode_instance, servicer.calls) == ("ok", "d2", 2)


async def test_unavailable_after_the_first_token_is_an_error(both: Both) -> None:
    async def die(request: Any) -> AsyncIterator[Any]:
        yield message(delta("a", 1))
        raise UnavailableError("no decode instance left")

    async with router() as (servicer, address), both.connect(address) as client:
        servicer.script = die
        stream = await client.call("generate", "hi", stream=True)
        assert await client.next(stream) is not None
        with pytest.raises(UnavailableError):
            await client.next(stream)
        assert await client.next(stream) is None
        assert servicer.calls == 1


async def test_retries_are_bounded_and_can_be_off(both: Both) -> None:
    async def never(request: Any) -> AsyncIterator[Any]:
        raise UnavailableError("nobody", retry_after_s=0.001)
        yield

    async with router() as (servicer, address):
        servicer.script = never
        async with both.connect(address, retries=1) as client:
            with pytest.raises(UnavailableError):
                await client.call("generate", "hi")
        assert servicer.calls == 2
        async with both.connect(address, retries=0) as client:
            with pytest.raises(UnavailableError):
                await client.call("generate", "hi")
        assert servicer.calls == 3


async def test_a_wait_that_the_deadline_does_not_allow_is_not_begun(both: Both) -> None:
    async def later(request: Any) -> AsyncIterator[Any]:
        raise UnavailableError("nobody", retry_after_s=3600.0)
        yield

    async with router() as (servicer, address), both.connect(address, timeout=30.0) as client:
        servicer.script = later
        with pytest.raises(UnavailableError):
            await client.call("generate", "hi")
        assert servicer.calls == 1


async def test_half_an_answer_is_an_error(both: Both) -> None:
    async def half(request: Any) -> AsyncIterator[Any]:
        yield message(delta("a", 1, end=STOP))

    async with router() as (servicer, address), both.connect(address) as client:
        servicer.script = half
        with pytest.raises(InternalError, match="middle"):
            await client.call("generate", "hi", n=2)


async def test_nobody_listens(both: Both) -> None:
    async with both.connect("127.0.0.1:1", retries=0) as client:
        with pytest.raises(UnavailableError):
            await client.call("models")


async def test_a_closed_client_says_so(both: Both) -> None:
    async with router() as (_, address):
        async with both.connect(address) as client:
            await client.call("models")
        with pytest.raises(UnavailableError, match="closed"):
            await client.call("models")


async def test_the_services_token_is_proved_and_not_shown(both: Both, tmp_path: Path) -> None:
    files = {}
    for name in ("right", "wrong"):
        files[name] = tmp_path / name
        files[name].write_text(f"{name}: 0123456789abcdef")
        files[name].chmod(0o600)
    async with router(token=read_token(str(files["right"]))) as (servicer, address):
        async with both.connect(address, token_file=str(files["right"])) as client:
            assert (await client.call("generate", "hi", n=2)).text == "hello"
            assert "0123456789abcdef" not in str(servicer.metadata)
            assert (await client.call("models"))[0].name == "tiny"
        async with both.connect(address, token_file=str(files["wrong"])) as client:
            with pytest.raises(UnauthenticatedError, match="another token"):
                await client.call("generate", "hi")
        async with both.connect(address, token="right: 0123456789abcdef") as client:
            with pytest.raises(UnauthenticatedError, match="proof"):
                await client.call("generate", "hi")
    with pytest.raises(InvalidRequestError, match="API key"):
        await both.connect("127.0.0.1:1", token="sk-1", token_file=str(files["right"])).__aenter__()


async def test_the_order_of_serving_goes_beside_the_request(both: Both) -> None:
    async with router() as (servicer, address), both.connect(address, token="sk-1") as client:
        for options in ({}, {"order": "decode_first"}, {"order": "prefill_first"}):
            await client.call("generate", "hi", n=2, **options)
            assert servicer.metadata.get("x-baton-order") == options.get("order")
        for wrong in ("first", "", 1):
            with pytest.raises(InvalidRequestError) as caught:
                await client.call("generate", "hi", order=wrong)
            assert caught.value.field == "order"
        assert servicer.calls == 3


async def test_the_other_calls(both: Both) -> None:
    async with router() as (servicer, address), both.connect(address) as client:
        decision = await client.call("route", [{"role": "user", "content": "hi"}])
        assert servicer.calls == 3  # two UNAVAILABLE answers before
        assert decision.prefill_addresses == ("a:1",)
        assert (decision.candidates[0].role, decision.candidates[0].score) == (Role.DECODE, 0.25)
        (instance,) = await client.call("list_instances")
        assert (instance.instance_id, instance.role, instance.load.num_running) == ("p0", Role.PREFILL, 2)
        assert instance.load.draining
        (model,) = await client.call("models")
        assert (model.name, model.max_model_len, model.eos_token_ids) == ("tiny", 512, (2,))
        stats = await client.call("stats", window=12.0)
        assert (stats.window_s, stats.num_waiting, stats.ttft_ms.p90) == (12.0, 7, 2.0)
        assert (stats.itl_ms, stats.hit_rate) == (None, None)
        assert (await client.call("explain", "gen-1"))["why"] == ["it had all of it"]
        with pytest.raises(NotFoundError):
            await client.call("explain", "gen-2")
        for name in _STRANGE:
            with pytest.raises(InternalError, match="no JSON object"):
                await client.call("explain", name)


async def strange_answer(
    request: router_pb2.RouterGenerateRequest,
) -> AsyncIterator[router_pb2.RouterGenerateResponse]:
    """What no router sends, without end: the prompt says what."""
    if request.text == "after its end":
        yield message(delta("x", 1, end=STOP))
    logprob = common_pb2.TokenLogprob(token_id=1, logprob=-0.5)
    while True:
        match request.text:
            case "text":
                yield message(delta("a" * 100_000, 1))
            case "tokens":
                yield message(delta("a" * 1000, *range(1000)))
            case "probabilities":
                yield message(router_pb2.TextDelta(text="a", token_ids=[1], logprobs=[logprob] * 2))
            case _:
                yield message(delta("y", 1))


@pytest.mark.parametrize("what", ["text", "tokens", "probabilities", "after its end"])
async def test_an_answer_without_end_is_refused(what: str, both: Both) -> None:
    async with router() as (servicer, address), both.connect(address, timeout=WAIT_S) as client:
        servicer.script = strange_answer
        with pytest.raises(InternalError, match="sequence 0"):
            await client.call("generate", what, max_tokens=5)
        await asyncio.wait_for(servicer.cancelled.wait(), WAIT_S)


async def test_health_names_the_routers_that_serve(both: Both) -> None:
    gone = f"127.0.0.1:{free_port()}"
    async with router() as (_, address), both.connect([address, gone]) as client:
        assert await client.call("health", timeout=240.0) == {address: True, gone: False}
        with pytest.raises(InvalidRequestError):
            await client.call("health", timeout=0.0)


async def test_bad_input_never_leaves(both: Both) -> None:
    async with router() as (servicer, address), both.connect(address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.call("generate", "hi", temperature=-1.0)
        assert caught.value.field == "temperature"
        with pytest.raises(InvalidRequestError):
            await client.call("generate", "hi", timeout=-1.0)
        assert servicer.calls == 0


async def test_closing_ends_what_is_being_read() -> None:
    async with router() as (servicer, address):
        servicer.script = endless
        client = AsyncClient(address)
        stream = await client.generate("hi", stream=True)
        await anext(stream)
        await anext(stream)
        reader = asyncio.create_task(anext(stream))
        done, _ = await asyncio.wait([reader], timeout=0.05)
        assert not done
        await client.close()
        with pytest.raises(UnavailableError, match="closed"):
            await asyncio.wait_for(reader, WAIT_S)
        await asyncio.wait_for(servicer.cancelled.wait(), WAIT_S)


async def test_closing_ends_a_wait_between_tries(both: Both) -> None:
    async def later(request: Any) -> AsyncIterator[Any]:
        raise UnavailableError("nobody", retry_after_s=3600.0)
        yield

    async with router() as (servicer, address):
        servicer.script = later
        async with both.connect(address, timeout=36000.0) as client:
            reader = asyncio.create_task(client.call("generate", "hi"))
            while not servicer.calls:
                await asyncio.wait([reader], timeout=0.01)
            done, _ = await asyncio.wait([reader], timeout=0.1)
            assert not done
        with pytest.raises(UnavailableError, match="closed"):
            await asyncio.wait_for(reader, WAIT_S)
