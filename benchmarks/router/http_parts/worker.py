"""A worker without a model, for ``benchmarks/http.py``: it gives every running request a token per step.

    baton    Baton's worker protocol: one gRPC message per step
    openai   what a server of the OpenAI interface sends: one event per request and step

Tokens are letters, and each follows from all tokens before it, the prompt's too: who repeats one or leaves one out gets
another text. The OpenAI kind has no prompt's tokens, and gives the same letter always.

The step's time is written to a shared file just before the tokens leave, so that the load generator, which knows when
they arrive, can tell how long they were under way. A request says by ``c<slot>`` in its id where to write.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import re
import string
import struct
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httptools
import uvloop

from baton.api.v1 import common_pb2, events_pb2, worker_pb2, worker_pb2_grpc
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import LayerShape
from baton.rpc.convert import fingerprint_to_pb
from baton.rpc.multiplex_server import Outbox
from baton.rpc.server import GrpcServer
from baton.rpc.tls import Tls
from baton.token_ids import pack_ids
from baton.tokenizer import Tokenizer

TOKENS_PER_SLOT = 1024
_SLOT = re.compile(rb'"user":\s?"c(\d+)"')
_MAX_TOKENS = re.compile(rb'"max_tokens":\s?(\d+)')
_FINGERPRINT = Fingerprint(
    model="canned",
    model_digest="0" * 64,
    kv_dtype="bfloat16",
    block_size=16,
    layer_shapes=(LayerShape(1, 4, 4),),
    block_bytes=1024,
)


@dataclass(slots=True)
class Running:
    """A request: where its times go, its tokens in all and so far, and what sends one: ``send(first, last)``."""

    slot: int
    limit: int
    send: Callable[[bool, bool], None]
    sent: int = 0
    call: int = 0
    first: bool = True


class Clock:
    """The shared file of times, and the pace of the steps."""

    def __init__(self, path: str, step_s: float) -> None:
        with Path(path).open("r+b") as file:
            self._times = mmap.mmap(file.fileno(), 0)
        self._step_s = step_s
        self._due = 0.0

    def stamp(self, item: Running) -> None:
        """Note that a request's next token leaves now."""
        struct.pack_into("d", self._times, 8 * (item.slot * TOKENS_PER_SLOT + item.sent), time.monotonic())
        item.sent += 1

    async def next_step(self) -> None:
        """Wait until the next step is due."""
        now = time.monotonic()
        self._due = max(now, self._due + self._step_s)
        await asyncio.sleep(self._due - now)


class Engine:
    """Gives every running request a token per step, and never waits for what becomes of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running: dict[int, Running] = {}
        self._some = asyncio.Event()

    def add(self, item: Running) -> None:
        self._running[item.call] = item
        self._some.set()

    def remove(self, call: int) -> None:
        self._running.pop(call, None)

    async def run(self) -> None:
        while True:
            while not self._running:
                self._some.clear()
                await self._some.wait()
            await self._clock.next_step()
            for item in list(self._running.values()):
                first = item.first
                item.first = False
                self._clock.stamp(item)
                last = item.sent == item.limit
                if last:
                    del self._running[item.call]
                item.send(first, last)


class BatonWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A decode instance."""

    def __init__(self, name: str, model: str, clock: Clock) -> None:
        self._name = name
        self._model = model
        self.clock = clock
        tokenizer = Tokenizer.load(model)
        self._vocab_size = tokenizer.vocab_size
        self._letters = [tokenizer.encode(x, add_special_tokens=False)[0] for x in string.ascii_lowercase]
        self._epoch = os.urandom(16)

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Any) -> worker_pb2.GetInfoResponse:
        return worker_pb2.GetInfoResponse(
            instance_id=self._name,
            role=common_pb2.ROLE_DECODE,
            epoch=self._epoch,
            fingerprint=fingerprint_to_pb(_FINGERPRINT),
            num_blocks=100_000,
            max_model_len=32768,
            max_num_seqs=256,
            served_model_name="canned",
            vocab_size=self._vocab_size,
            model_path=self._model,
        )

    async def StreamLoad(
        self, request: worker_pb2.StreamLoadRequest, context: Any
    ) -> AsyncIterator[worker_pb2.StreamLoadResponse]:
        """Report a load that never changes."""
        yield worker_pb2.StreamLoadResponse(load=common_pb2.LoadReport(blocks_total=100_000))
        await asyncio.Event().wait()

    async def StreamKvEvents(
        self, request: worker_pb2.StreamKvEventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.StreamKvEventsResponse]:
        stored = events_pb2.KvEvent(stored=events_pb2.KvBlocksStored(tier="device"))
        batch = events_pb2.KvEventBatch(epoch=self._epoch, sequence=0, snapshot=True, events=[stored])
        yield worker_pb2.StreamKvEventsResponse(batch=batch)
        await asyncio.Event().wait()

    async def GenerateMany(
        self, requests: AsyncIterator[worker_pb2.GenerateManyRequest], context: Any
    ) -> AsyncIterator[worker_pb2.GenerateManyResponse]:
        calls = CannedCalls(self)

        async def read() -> None:
            async for message in requests:
                calls.start(message)

        task = asyncio.create_task(read())
        try:
            while (message := await calls.outbox.next()) is not None:
                yield message
        finally:
            task.cancel()
            calls.close()

    def running(self, start: worker_pb2.CallStart, outbox: Outbox) -> Running:
        """Return a request that begins."""
        request = start.request
        slot = int(request.request_id[1:].partition("-")[0])
        trace = common_pb2.RequestTrace(
            path=common_pb2.PREFILL_PATH_LOCAL,
            decode_instance=self._name,
            prompt_tokens=len(request.prompt_token_ids) // 4,
        )

        context = zlib.crc32(pack_ids(request.output_token_ids), zlib.crc32(request.prompt_token_ids))

        def send(first: bool, last: bool) -> None:
            nonlocal context
            token = self._letters[context % len(self._letters)]
            context = zlib.crc32(pack_ids([token]), context)
            if not (first or last):
                outbox.token(start.call, token)
                return
            delta = worker_pb2.SequenceDelta(token_ids=[token])
            if last:
                delta.finish_reason = common_pb2.FINISH_REASON_LENGTH
            outbox.send(start.call, worker_pb2.GenerateResponse(deltas=[delta], trace=trace))
            if last:
                outbox.end(start.call)

        return Running(slot, request.sampling.max_tokens, send, len(request.output_token_ids), call=start.call)


class CannedCalls:
    """The calls of one stream."""

    def __init__(self, worker: BatonWorker) -> None:
        self._worker = worker
        self._engine = Engine(worker.clock)
        self.outbox = Outbox()
        self._task = asyncio.create_task(self._engine.run())

    def start(self, message: worker_pb2.GenerateManyRequest) -> None:
        for start in message.starts:
            self._engine.add(self._worker.running(start, self.outbox))
        for call in message.cancels:
            self._engine.remove(call)

    def close(self) -> None:
        self._task.cancel()


class OpenAiWorker(asyncio.Protocol):
    """One connection to a server of the OpenAI interface."""

    _HEAD = b'{"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"canned","choices":[{"index":0,'
    _USAGE = b'"usage":{"prompt_tokens":1000,"completion_tokens":1,"total_tokens":1001}'

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._body = bytearray()
        self._url = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # an offer of HTTP/2
            self.transport.close()

    def on_url(self, url: bytes) -> None:
        self._url = url
        self._body.clear()

    def on_body(self, body: bytes) -> None:
        """Take a piece of its body."""
        self._body += body

    def on_message_complete(self) -> None:
        if self._url != b"/v1/completions":
            self._answer(b'{"status":"ok","model_path":"canned","object":"list","data":[{"id":"canned"}]}')
            return
        slot = _SLOT.search(self._body)
        limit = _MAX_TOKENS.search(self._body)
        if slot is None or limit is None:
            raise ValueError(f"no slot or no max_tokens in {bytes(self._body[-200:])!r}")
        self._streams = b'"stream":true' in self._body or b'"stream": true' in self._body
        if self._streams:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            self.transport.write(head)
        self._engine.add(Running(int(slot[1]), int(limit[1]), self._token, call=int(slot[1])))

    def _token(self, first: bool, last: bool) -> None:
        finish = b'"length"' if last else b"null"
        piece = self._HEAD + b'"text":"a","logprobs":null,"finish_reason":' + finish + b"}]"
        if not self._streams:
            if last:
                self._answer(piece + b"," + self._USAGE + b"}")
            return
        data = b"data: " + piece + b"}\n\n" + (b"data: [DONE]\n\n" if last else b"")
        self.transport.write(b"%x\r\n%b\r\n%b" % (len(data), data, b"0\r\n\r\n" if last else b""))

    def _answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)


async def main() -> None:
    """Listen, print the port, and serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("baton", "openai"))
    parser.add_argument("--name", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", required=True)
    parser.add_argument("--times", required=True)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--tls", nargs=3, metavar=("CERT", "KEY", "CA"))
    args = parser.parse_args()
    clock = Clock(args.times, args.step_ms / 1000)
    if args.kind == "baton":
        server = GrpcServer(host="127.0.0.1", port=args.port, services=[], tls=Tls(*args.tls) if args.tls else None)
        kind: Any = BatonWorker  # the calls that it lacks are not made
        worker = kind(args.name, args.model, clock)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server.server)
        sys.stdout.write(f"{await server.start()}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()
    else:
        engine = Engine(clock)
        loop = asyncio.get_running_loop()
        http = await loop.create_server(lambda: OpenAiWorker(engine), "127.0.0.1", args.port)
        sys.stdout.write(f"{http.sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()
        await engine.run()


if __name__ == "__main__":
    uvloop.run(main())
