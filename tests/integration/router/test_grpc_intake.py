"""Messages of clients over gRPC have HTTP's bounds, which are checked before anything is made of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.http2_peer import data, frame, headers, message
from tests.support.router.limited_app import app_with_limits

from baton.api.v1 import router_pb2, router_pb2_grpc
from baton.errors import InvalidRequestError
from baton.rpc.http2.connection import END_STREAM, PREFACE, SETTINGS
from baton_router.frontend.grpc import intake
from baton_router.frontend.grpc.intake import check_fields

FREE, LIMITED = ((("authorization", f"Bearer sk-{name}"),) for name in ("free", "limited"))
Request = router_pb2.RouterGenerateRequest


def chat(count: int) -> router_pb2.RouterGenerateRequest:
    return Request(chat=router_pb2.ChatMessages(messages=[router_pb2.ChatMessage()] * count))


def tokens(count: int) -> router_pb2.RouterGenerateRequest:
    return Request(token_ids=router_pb2.TokenIds(ids=[5] * count))


class Refused(Exception):
    """A call's status and text."""


async def generate(address: str, request: Any, metadata: Any) -> int:
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        try:
            return len([answer async for answer in stub.Generate(request, metadata=metadata, timeout=240)])
        except grpc.RpcError as error:
            raise Refused(f"{error.code().name}: {error.details()}") from error  # type: ignore[attr-defined]


async def test_what_is_too_much_is_refused_before_it_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text_request(*args: Any) -> None:
        raise AssertionError("it was converted")

    async with app_with_limits(tmp_path) as app:
        address = f"127.0.0.1:{app.grpc_port}"
        assert await generate(address, tokens(3), FREE) > 0
        monkeypatch.setattr("baton_router.frontend.grpc.servicer.text_request", text_request)
        for request, what in (
            (chat(10_001), "INVALID_ARGUMENT: chat.messages must have at most 10000"),
            (chat(2_000_000), "INVALID_ARGUMENT: the message has more than 65536 fields"),
            (Request(text="x", stop=[""] * 33), "INVALID_ARGUMENT: stop must have at most 32"),
            (Request(text="x", stop=[""] * 1_000_000), "INVALID_ARGUMENT: the message has more than 65536 fields"),
            (tokens(4097), "INVALID_ARGUMENT: this model's context is 4096 tokens and token_ids has 4097"),
            (Request(text="x", output_token_ids=[5] * 5000), "output_token_ids has 5000"),
            (Request(text="x" * (4 << 20)), "at most 4194304 are taken"),
        ):
            with pytest.raises(Refused, match=what):
                await generate(address, request, FREE)


async def test_limits_are_asked_before_the_message_is_read(tmp_path: Path) -> None:
    async with app_with_limits(tmp_path) as app:
        address = f"127.0.0.1:{app.grpc_port}"
        with pytest.raises(Refused, match="more than 65536 fields"):
            await generate(address, chat(2_000_000), LIMITED)
        with pytest.raises(Refused, match="RESOURCE_EXHAUSTED: this tenant has used its 1 requests a minute"):
            await generate(address, chat(2_000_000), LIMITED)  # the one before counts although it was refused
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream("/baton.api.v1.RouterService/Generate")(metadata=LIMITED, timeout=240)
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # although no message was sent
        assert await generate(address, tokens(3), FREE) > 0


async def test_messages_that_do_not_come_keep_only_their_own_tenant_waiting(tmp_path: Path) -> None:
    async with app_with_limits(tmp_path) as app:
        address = f"127.0.0.1:{app.grpc_port}"
        async with grpc.aio.insecure_channel(address) as channel:
            silent = [
                channel.stream_stream("/baton.api.v1.RouterService/Generate")(metadata=LIMITED, timeout=240)
                for _ in range(20)
            ]
            await asyncio.gather(*(call.wait_for_connection() for call in silent[:1]))
            assert await generate(address, tokens(3), FREE) > 0
            for call in silent:
                call.cancel()
        assert await generate(address, tokens(3), LIMITED) > 0


async def test_calls_that_wait_to_be_read_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_UNREAD_CALLS", 8)
    async with app_with_limits(tmp_path) as app:
        address = f"127.0.0.1:{app.grpc_port}"
        async with grpc.aio.insecure_channel(address) as channel:
            silent = [
                channel.stream_stream("/baton.api.v1.RouterService/ListModels")(metadata=LIMITED, timeout=240)
                for _ in range(9)
            ]
            ended = [asyncio.ensure_future(call.code()) for call in silent]
            done, _ = await asyncio.wait(ended, timeout=240, return_when=asyncio.FIRST_COMPLETED)
            assert [x.result() for x in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
            assert await generate(address, tokens(3), FREE) > 0
            for call in silent:
                call.cancel()
            await asyncio.gather(*ended, return_exceptions=True)


async def test_a_client_that_does_not_read_keeps_no_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "UNREAD_S", 0.3)
    async with app_with_limits(tmp_path) as app:
        _, writer = await asyncio.open_connection("127.0.0.1", app.grpc_port)
        head = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/baton.api.v1.RouterService/Generate"),
                (b":authority", b"x"), (b"content-type", b"application/grpc"), (b"te", b"trailers"),
                *((name.encode(), value.encode()) for name, value in FREE)]  # fmt: skip
        no_window = frame(SETTINGS, data=(4).to_bytes(2) + (0).to_bytes(4))
        body = message(tokens(400).SerializeToString())
        writer.write(PREFACE + no_window + headers(1, head) + data(1, body, END_STREAM))
        try:
            async with asyncio.timeout(240):
                while not app.dispatcher.num_in_flight:
                    await asyncio.sleep(0.01)
                while app.dispatcher.num_in_flight:
                    await asyncio.sleep(0.01)
            assert not writer.is_closing()
        finally:
            writer.close()


def test_fields_are_counted_in_the_encoded_message() -> None:
    whole = chat(100)
    whole.sampling.logit_bias[5] = 1.0
    whole.output_token_ids.extend([1000] * 100)  # packed: one field
    data = whole.SerializeToString()
    check_fields(data, Request.DESCRIPTOR, 106)
    with pytest.raises(InvalidRequestError, match="more than 105 fields"):
        check_fields(data, Request.DESCRIPTOR, 105)
    for broken in (data + b"\xff", b"\x0b", b"\xff" * 1_000_000):
        with pytest.raises(InvalidRequestError):
            check_fields(broken, Request.DESCRIPTOR, 1000)
