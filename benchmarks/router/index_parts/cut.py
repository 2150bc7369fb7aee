"""The event stream is cut for ten seconds: a router and a decode instance as processes, a proxy between them.

Broken: every connection is reset and none is accepted. Silent: the connections stay, but nothing comes through. Told is
how long it takes until the router's ``/metrics`` say ``stale``, and how long after the cut they say ``exact`` again,
with as many blocks as the instance holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from tests.support.servers.tcp_proxy import TcpProxy

from baton.api.v1 import worker_pb2, worker_pb2_grpc
from baton.rpc.channel import open_channel
from baton.rpc.convert import sampling_to_pb
from baton.token_ids import pack_ids
from baton.types import SamplingParams

MODEL = Path(__file__).parents[3] / "models" / "baton-tiny"
CUT_S = 10.0
POLL_S = 0.01
GIVE_UP_S = 120.0
SAMPLING = sampling_to_pb(SamplingParams(temperature=0.0, max_tokens=2))


@contextlib.asynccontextmanager
async def serving(module: str, pattern: str, *flags: str) -> AsyncIterator[str]:
    """Run a service and give what its log says about where it serves."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *flags), stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(GIVE_UP_S):
            while line := (await process.stderr.readline()).decode():
                if result := re.search(pattern, line):
                    break
            else:
                raise SystemExit(f"{module} did not start")
        reading = asyncio.create_task(process.stderr.read())
        yield result[1]
        reading.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class Watch:
    """Reads the router's metrics."""

    def __init__(self, http: str) -> None:
        self.url = f"http://{http}/metrics"

    def _read(self) -> tuple[str, int]:
        text = urllib.request.urlopen(self.url, timeout=GIVE_UP_S).read().decode()
        state = re.search(r'^baton_router_index_state\{.*state="(\w+)"\} 1\.0$', text, re.MULTILINE)
        blocks = re.search(r"^baton_router_index_blocks\{.*\} (\S+)$", text, re.MULTILINE)
        return (state[1] if state else "none", int(float(blocks[1])) if blocks else 0)

    async def until(self, condition: Callable[[str, int], bool]) -> float:
        """Wait for state and number of blocks; return the seconds that it took."""
        began = time.perf_counter()
        async with asyncio.timeout(GIVE_UP_S):
            while not condition(*await asyncio.to_thread(self._read)):  # noqa: ASYNC110 - in another process
                await asyncio.sleep(POLL_S)
        return time.perf_counter() - began


async def count_cached_blocks(address: str) -> int:
    """Ask an instance how many blocks it caches."""
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        async for answer in stub.StreamKvEvents(worker_pb2.StreamKvEventsRequest(), timeout=GIVE_UP_S):
            return sum(len(event.stored.block_hashes) for event in answer.batch.events)
    raise SystemExit("the instance gave no snapshot")


async def use(address: str, seeds: range) -> None:
    """Generate something on an instance, past the router: its cache changes."""
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        for seed in seeds:
            prompt = [(seed * 131 + 7 * at) % 900 + 10 for at in range(100 + 10 * seed)]
            request = worker_pb2.GenerateRequest(
                request_id=str(seed), prompt_token_ids=pack_ids(prompt), sampling=SAMPLING
            )
            async for _ in stub.Generate(request, timeout=GIVE_UP_S):
                pass


async def _case(watch: Watch, proxy: TcpProxy, address: str, how: str, seeds: range) -> dict[str, Any]:
    await watch.until(lambda state, _: state == "exact")
    began = time.perf_counter()
    if how == "broken":
        await proxy.cut()
    else:
        proxy.freeze()
    stale_s = await watch.until(lambda state, _: state == "stale")
    await use(address, seeds)
    await asyncio.sleep(max(0.0, CUT_S - (time.perf_counter() - began)))
    if how == "broken":
        await proxy.start()
    else:
        proxy.thaw()
    truth = await count_cached_blocks(address)
    exact_s = await watch.until(lambda state, blocks: state == "exact" and blocks == truth)
    return {"stale_after_s": stale_s, "exact_after_s": exact_s, "blocks": truth}


async def measure_cuts() -> dict[str, dict[str, Any]]:
    """Cut twice, in both ways."""
    out = {}
    worker = ("--model", str(MODEL), "--threads", "1", "--kv-blocks", "60", "--port", "0")
    async with serving("baton_decode.main", r"listening on ([\d.:]+)", *worker) as address:
        proxy = TcpProxy(int(address.rpartition(":")[2]))
        port = await proxy.start()
        router = ("--port", "0", "--grpc-port", "0", "--decode", f"127.0.0.1:{port}", "--model", str(MODEL))
        async with serving("baton_router.main", r"serving http=(\S+)", *router) as http:
            for at, how in enumerate(("broken", "silent")):
                out[how] = await _case(Watch(http), proxy, address, how, range(10 * at, 10 * at + 8))
        await proxy.stop()
    return out
