"""What it costs a process to take an instance's message of one step, by the way it takes it.

Four servers in another process send a message of eight tokens every 10 ms, as four instances with eight streams each
do. The processor time of the process that takes them, all its threads, is divided by the messages:

    grpc      gRPC's asyncio client
    http2     the same calls to the same servers over ``baton.rpc.http2``, which the router uses
    socket    length-prefixed frames over a TCP connection, with nothing else: the least that there could be

each in uvloop's event loop and in asyncio's own.

    python benchmarks/router/step_message.py [--seconds 5] [--only http2]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import uvloop

SERVERS = 4
STREAMS = 8
STEP_S = 0.01
WARM_UP = 100


def message() -> Any:
    """Return what a step says."""
    from baton.api.v1 import worker_pb2

    return worker_pb2.GenerateManyResponse(token_calls=range(100, 100 + STREAMS), token_ids=range(STREAMS))


def serve(ports: Connection, kind: str) -> None:
    """Send steps to each caller, until killed."""
    uvloop.run(_serve(ports, kind))


async def _serve(ports: Connection, kind: str) -> None:
    from baton.api.v1 import worker_pb2_grpc
    from baton.rpc.server import GrpcServer

    step = message()
    frame = len(step.SerializeToString()).to_bytes(4) + step.SerializeToString()

    class Servicer(worker_pb2_grpc.WorkerServiceServicer):
        async def GenerateMany(self, requests: Any, context: Any) -> AsyncIterator[Any]:
            while True:
                await asyncio.sleep(STEP_S)
                yield step

    async def send(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            await asyncio.sleep(STEP_S)
            writer.write(frame)

    results = []
    servers = []
    for _ in range(SERVERS):
        if kind == "socket":
            server: Any = await asyncio.start_server(send, "127.0.0.1", 0)
            results.append(server.sockets[0].getsockname()[1])
        else:
            server = GrpcServer(host="127.0.0.1", port=0, services=[])
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(Servicer(), server.server)
            results.append(await server.start())
        servers.append(server)
    ports.send(results)
    await asyncio.Event().wait()


class Taker:
    """Takes messages, and counts them."""

    def __init__(self) -> None:
        from baton.api.v1 import worker_pb2

        self._read = worker_pb2.GenerateManyResponse.FromString
        self.count = 0
        self.warm = asyncio.Event()

    def count_answer(self, answer: Any) -> None:
        """Look at what came, as the router does first."""
        self.count += 1
        if self.count == WARM_UP:
            self.warm.set()
        for _, _ in zip(answer.token_calls[:], answer.token_ids[:], strict=True):
            pass

    def on_message(self, data: bytes) -> None:
        self.count_answer(self._read(data))

    def on_end(self, end: Exception) -> None:
        """Fail: the server has gone."""
        raise end

    def on_writable(self) -> None:
        """There is nothing more to say."""


class Frames(asyncio.Protocol):
    """Cuts what comes into frames."""

    def __init__(self, taker: Taker) -> None:
        self._taker = taker
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        at = 0
        while at + 4 <= len(data) and (end := at + 4 + int.from_bytes(data[at : at + 4])) <= len(data):
            self._taker.on_message(data[at + 4 : end])
            at = end
        self._rest = data[at:]


async def measure_reader(kind: str, ports: list[int], seconds: float) -> float:
    """Take messages for so long; returns the microseconds of one."""
    from baton.rpc.channel import open_channel
    from baton.rpc.http2.message_stream import Dialer
    from baton.rpc.multiplex import CallStream

    taker = Taker()
    kept = list[Any]()

    async def read(call: Any) -> None:
        async for answer in call:
            taker.count_answer(answer)

    for port in ports:
        address = f"127.0.0.1:{port}"
        if kind == "socket":
            kept.append(await asyncio.get_running_loop().create_connection(lambda: Frames(taker), "127.0.0.1", port))
        elif kind == "http2":
            kept.append(await Dialer(address).open(CallStream.METHOD, taker))
        else:
            from baton.api.v1 import worker_pb2_grpc

            channel = open_channel(address)
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            kept += [channel, asyncio.create_task(read(stub.GenerateMany()))]
    await taker.warm.wait()
    before = time.process_time()
    count = taker.count
    await asyncio.sleep(seconds)
    return 1e6 * (time.process_time() - before) / (taker.count - count)


def measure(result: Connection, kind: str, loop: str, ports: list[int], seconds: float) -> None:
    """Read messages in this process."""
    run = uvloop.run if loop == "uvloop" else asyncio.run
    result.send(run(measure_reader(kind, ports, seconds)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    for kind in ("grpc", "http2", "socket"):
        for loop in ("uvloop", "asyncio"):
            if args.only not in kind:
                continue
            here, there = processes.Pipe()
            server = processes.Process(target=serve, args=(there, kind), daemon=True)
            server.start()
            ports = here.recv()
            client = processes.Process(target=measure, args=(there, kind, loop, ports, args.seconds), daemon=True)
            client.start()
            print(f"{kind:7} {loop:8} {here.recv():6.1f} us a message", flush=True)
            client.kill()
            server.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
