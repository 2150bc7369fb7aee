"""The load generator of ``benchmarks/http.py``: closed loop, one request at a time per connection.

Prints ``warm`` when the requests before the measurement are done and waits for a line on standard input; prints a JSON
object when all are done. An answer is wrong if its text is not that of the first one to the same body.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import re
import ssl
import struct
import sys
import time
from pathlib import Path

import httptools
import uvloop

TOKENS_PER_SLOT = 1024
_TEXT = re.compile(rb'"text":"([a-z]*)"')


class Load:
    """What all connections share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.bodies = [body.encode() for body in json.loads(Path(args.bodies).read_text(encoding="utf-8"))]
        with Path(args.times).open("r+b") as file:
            self.times = mmap.mmap(file.fileno(), 0)
        self.left = 0
        self.tokens = 0
        self.next_body = 0
        self.failed: list[str] = []
        self.texts: dict[int, bytes] = {}
        self.wrong = 0
        self.expected = args.tokens
        self.latencies: list[float] = []
        self.delays: list[float] = []
        self.done = asyncio.Event()
        self.busy = 0

    async def run(self, connections: list[Connection], total: int) -> None:
        """Send ``total`` requests and wait for their answers."""
        self.left = total
        self.busy = len(connections)
        self.latencies = []
        self.delays = []
        self.tokens = 0
        self.wrong = 0
        self.done.clear()
        for connection in connections:
            connection.send()
        await self.done.wait()


class Connection(asyncio.Protocol):
    """One connection: sends a request, reads its answer, sends the next."""

    def __init__(self, load: Load, slot: int) -> None:
        self._load = load
        self._slot = slot
        self._body = bytearray()
        self._parser = httptools.HttpResponseParser(self)
        self._seen = self._tokens = self._body_at = 0
        self._text = b""
        self._waiting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Count a request that this cuts short."""
        if self._waiting:
            self._load.failed.append(f"connection lost: {exc!r}")
            self._finish()

    def send(self) -> None:
        """Send the next request, if one is left."""
        load = self._load
        if load.left == 0 or self._transport.is_closing():
            load.busy -= 1
            if load.busy == 0:
                load.done.set()
            return
        load.left -= 1
        self._body_at = load.next_body % len(load.bodies)
        body = load.bodies[self._body_at].replace(b"c0000", b"c%d" % self._slot)
        load.next_body += 1
        self._body.clear()
        self._text = b""
        self._seen = self._tokens = 0
        self._waiting = True
        self._began = time.monotonic()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        self._transport.write(head % len(body) + body)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        """Take a piece of an answer, and time the tokens in it."""
        self._body += data
        load = self._load
        base = self._slot * TOKENS_PER_SLOT
        for match in _TEXT.finditer(self._body, self._seen):
            for _ in range(len(match[1])):
                sent = struct.unpack_from("d", load.times, 8 * (base + self._tokens))[0]
                load.delays.append(self._now - sent)
                self._tokens += 1
            self._text += match[1]
            self._seen = match.end()

    def on_message_complete(self) -> None:
        """Take the end of an answer."""
        load = self._load
        if self._parser.get_status_code() != 200 or self._tokens != load.expected:
            load.failed.append(bytes(self._body[:300] + b" ... " + self._body[-300:]).decode(errors="replace"))
        elif load.texts.setdefault(self._body_at, self._text) != self._text:
            load.wrong += 1
        load.latencies.append(self._now - self._began)
        load.tokens += self._tokens
        asyncio.get_running_loop().call_soon(self._finish)  # not inside of the parser

    def _finish(self) -> None:
        self._waiting = False
        self.send()


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def quantile(values: list[float], share: float) -> float:
    """Return a quantile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def main() -> None:
    """Connect, warm up, wait for the word, measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--bodies", required=True, help="JSON list of bodies; c0000 in one becomes the slot")
    parser.add_argument("--times", required=True)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--warm-up", type=int, default=256)
    parser.add_argument("--tokens", type=int, required=True, help="tokens that each answer must have")
    parser.add_argument("--ca", help="authority of the router's certificate; default: no TLS")
    args = parser.parse_args()
    load = Load(args)
    loop = asyncio.get_running_loop()
    connections = []
    for slot in range(args.concurrency):
        connection = Connection(load, slot)
        await loop.create_connection(
            lambda made=connection: made,  # type: ignore[misc]
            "127.0.0.1",
            args.port,
            ssl=ssl.create_default_context(cafile=args.ca) if args.ca else None,
        )
        connections.append(connection)
    await load.run(connections, args.warm_up)
    say("warm")
    await asyncio.to_thread(sys.stdin.readline)
    load.failed.clear()
    began = time.monotonic()
    await load.run(connections, args.requests)
    result = {
        "requests": len(load.latencies),
        "tokens": load.tokens,
        "failed": len(load.failed),
        "failures": load.failed[:3],
        "wrong": load.wrong,
        "seconds": time.monotonic() - began,
        "latency_ms": {"p50": 1e3 * quantile(load.latencies, 0.5), "p99": 1e3 * quantile(load.latencies, 0.99)},
        "chunk_delay_ms": {"p50": 1e3 * quantile(load.delays, 0.5), "p99": 1e3 * quantile(load.delays, 0.99)},
    }
    say(json.dumps(result))


if __name__ == "__main__":
    uvloop.run(main())
