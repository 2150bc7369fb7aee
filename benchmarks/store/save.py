"""From the end of a prefill to "in the store": a real prefill process and a real KV store, blocks saved in two ways.

    when complete   a chunk's blocks are put when the chunk is computed (``--no-layerwise``)
    layer by layer  the store copies a layer of them while the next one is computed

Each with the prompt as one chunk and in chunks. The model is a random Llama of about 120M parameters. With ``--pipe
tcp`` a proxy stands between the two that lets bytes through so fast that the prompt's KV takes as long as its
computation; with ``--pipe shm`` nothing does. What counts is the time from the prefill's answer, its first token, to
the store's event that says that the last block can be found; it is negative if the store is first. Medians, the ways
in turns.

    python benchmarks/store/save.py --pipe tcp --write
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The root, for ``tests.support``, and not this file's folder: its http.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from typing import Any

import numpy as np
from benchmarks.kv import overlap as other

from baton.api.v1 import kvstore_pb2, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.rpc.channel import open_channel
from baton.rpc.convert import sampling_to_pb
from baton.rpc.server import free_port
from baton.token_ids import pack_ids
from baton.types import SamplingParams

RESULT = Path(__file__).parents[1] / "results" / "store" / "store_save.jsonl"
TOKENS = 1024
CHUNK = 256
BLOCK = 16
WAYS = {
    "one chunk, when complete": ("--prefill-chunk", str(TOKENS), "--no-layerwise"),
    "one chunk, layer by layer": ("--prefill-chunk", str(TOKENS), "--layerwise"),
    "chunks, when complete": ("--prefill-chunk", str(CHUNK), "--no-layerwise"),
    "chunks, layer by layer": ("--prefill-chunk", str(CHUNK), "--layerwise"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipe", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"add a line to {RESULT}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-store-save-") as folder:
        other.write_model(Path(folder))
        result = asyncio.run(measure(folder, args.pipe, args.repeats))
    print(json.dumps(result, indent=2))
    if args.write:
        with RESULT.open("a") as file:
            file.write(json.dumps(result) + "\n")
    return 0


async def measure(folder: str, pipe: str, repeats: int) -> dict[str, Any]:
    """Run every way in turns."""
    with contextlib.ExitStack() as stack:
        store = f"{other.HOST}:{free_port()}"
        port = store.rpartition(":")[2]
        stack.enter_context(other.process("baton_kvstore.main", "--port", port, "--capacity-bytes", str(1 << 30)))
        throttles = []
        prefills = {}
        for way, flags in WAYS.items():
            port = free_port()
            kv_port = free_port()
            prefills[way] = f"{other.HOST}:{port}"
            more = ["--port", str(port), "--kvstore", store, "--pipes", pipe]
            if pipe == "tcp":
                throttles.append(stack.enter_context(contextlib.closing(other.Throttle(kv_port))))
                more += ["--kv-port", str(kv_port), "--advertise", f"{other.PROXY_HOST}:{port}"]
            more += ["--model", folder, "--threads", "1", "--kv-blocks", "1024", "--no-prefix-caching"]
            more += ["--max-num-batched-tokens", str(TOKENS), *flags]
            stack.enter_context(other.process("baton_prefill.main", *more))
        for address in (store, *prefills.values()):
            await other.ready(address)
        rng = np.random.default_rng(0)
        compute = []
        speed = 0.0
        num_bytes = 0
        after: dict[str, list[float]] = {way: [] for way in WAYS}
        for repeat in range(repeats + 1):  # the first warms up
            for way, address in prefills.items():
                seconds, late, num_bytes = await request(address, store, rng)
                if repeat:
                    after[way].append(1000 * late)
                    compute.append(1000 * seconds)
                    print(f"[{repeat}/{repeats}] {way}: {1000 * late:.1f} ms", file=sys.stderr)
            speed = speed or num_bytes / seconds
            for throttle in throttles:
                throttle.bytes_per_s = speed
    return {
        "benchmark": "store_save", "pipe": pipe, "tokens": TOKENS, "chunk": CHUNK, "kv_bytes": num_bytes,
        "link_mb_per_s": speed / 1e6 if throttles else None, "prefill_ms": statistics.median(compute),
        "repeats": repeats,
        "in_store_ms_after_prefill": {way: statistics.median(times) for way, times in after.items()},
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "load": os.getloadavg()[0]},
    }  # fmt: skip


async def request(prefill: str, store: str, rng: np.random.Generator) -> tuple[float, float, int]:
    """Prefill a new prompt; returns its seconds, those from then to the store, and bytes of KV."""
    async with open_channel(prefill) as channel, open_channel(store) as watched:
        news = kvstore_pb2_grpc.KvStoreServiceStub(watched).StreamStoreEvents(
            kvstore_pb2.StreamStoreEventsRequest(heartbeat_ms=200)
        )
        await anext(aiter(news))  # what was there before
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        info = await stub.GetInfo(worker_pb2.GetInfoRequest())
        message = worker_pb2.PrefillRequest(
            request_id=rng.bytes(8).hex(),
            prompt_token_ids=pack_ids(rng.integers(3, other.VOCAB, TOKENS).tolist()),
            sampling=sampling_to_pb(SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)),
            fingerprint=info.fingerprint,
        )
        saved = asyncio.create_task(stored(news, TOKENS // BLOCK))
        started = time.monotonic()
        answered = 0.0
        call = stub.Prefill(message)
        async for response in call:
            if response.HasField("result"):
                answered = time.monotonic()
                break
        async with asyncio.timeout(60):
            late = await saved - answered
        call.cancel()
        news.cancel()
    return answered - started, late, TOKENS // BLOCK * info.fingerprint.block_bytes


async def stored(news: Any, count: int) -> float:
    """Return the moment when so many blocks more can be found."""
    async for response in news:
        count -= sum(len(event.stored.block_hashes) for event in response.batch.events)
        if count <= 0:
            break
    return time.monotonic()


if __name__ == "__main__":
    sys.exit(main())
