"""How much of a KV transfer a request waits for: a real prefill and a real decode process, in several ways.

    serial      the prompt is one chunk, its KV is fetched when all of it is computed
    chunked     chunks; a chunk's KV is fetched while the next one is computed
    layer-wise  chunks, and within a chunk a layer's KV is fetched while the next layer is computed

One random Llama of about 120M parameters. Between the processes stands a proxy that lets bytes through at a fixed
speed, chosen again in each repeat such that the serial transfer takes as long as the prefill: the case in which overlap
matters most. What is reported is what the services say themselves in the request's trace (``exposed_us``: from the end
of the remote computation to the last byte), medians over the repeats, the ways in turns.

    python benchmarks/kv/overlap.py --write
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
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers

from baton.api.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.engine.models.loader import quiet_transformers
from baton.rpc.channel import check_health, open_channel
from baton.rpc.convert import sampling_to_pb
from baton.rpc.server import free_port
from baton.token_ids import pack_ids
from baton.types import SamplingParams

RESULT = Path(__file__).parents[1] / "results" / "kv" / "overlap.json"
TOKENS = 2048
CHUNK = 256
VOCAB = 32000
WAYS = {
    "serial": ("--prefill-chunk", str(TOKENS), "--no-layerwise"),
    "chunked": ("--prefill-chunk", str(CHUNK), "--no-layerwise"),
    "layer-wise": ("--prefill-chunk", str(CHUNK), "--layerwise"),
    "layer-wise, one chunk": ("--prefill-chunk", str(TOKENS), "--layerwise"),
}
HOST = "127.0.0.1"
PROXY_HOST = "127.0.0.2"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-overlap-") as folder:
        write_model(Path(folder))
        result = asyncio.run(measure(folder, args.repeats))
    print(json.dumps(result, indent=2))
    if args.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def write_model(folder: Path) -> None:
    """A random Llama of about 120M parameters in bfloat16."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, vocab_size=VOCAB, num_attention_heads=12,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with quiet_transformers():
        model: Any = transformers.LlamaForCausalLM(config)
        model.to(torch.bfloat16).save_pretrained(folder)


class Throttle:
    """A proxy that passes on ``bytes_per_s`` from the server, all connections together; 0: as fast as it can."""

    def __init__(self, port: int) -> None:
        self.bytes_per_s = 0.0
        self._target = (HOST, port)
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._listener = socket.create_server((PROXY_HOST, port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                for a, b, slow in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pump, args=(a, b, slow), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(64 << 10):
                if slow and self.bytes_per_s:
                    with self._lock:
                        self._free_at = max(self._free_at, time.monotonic()) + len(data) / self.bytes_per_s
                        due = self._free_at
                    time.sleep(max(0.0, due - time.monotonic()))
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


@contextlib.contextmanager
def process(module: str, *flags: str) -> Iterator[None]:
    """A service's process."""
    child = subprocess.Popen([sys.executable, "-m", module, "--log-level", "warning", *flags])
    try:
        yield
    finally:
        child.terminate()
        child.wait(20)


async def ready(address: str) -> None:
    """Wait until a service says that it serves."""
    deadline = time.monotonic() + 120
    while not await check_health(address):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{address} did not come up")
        await asyncio.sleep(0.1)


async def measure(folder: str, repeats: int) -> dict[str, Any]:
    """Run every way in turns."""
    with contextlib.ExitStack() as stack:
        throttles = {}
        prefills = {}
        engine = ["--model", folder, "--threads", "1", "--kv-blocks", "1024", "--no-prefix-caching", "--pipes", "tcp"]
        engine += ["--max-num-batched-tokens", str(TOKENS)]
        for way, flags in WAYS.items():
            port = free_port()
            kv_port = free_port()
            throttles[way] = stack.enter_context(contextlib.closing(Throttle(kv_port)))
            more = ("--port", str(port), "--kv-port", str(kv_port), "--advertise", f"{PROXY_HOST}:{port}")
            prefills[way] = f"{HOST}:{port}"
            stack.enter_context(process("baton_prefill.main", *engine, *flags, *more))
        port = free_port()
        decode = f"{HOST}:{port}"
        stack.enter_context(process("baton_decode.main", *engine, "--port", str(port)))
        for address in (*prefills.values(), decode):
            await ready(address)
        rng = np.random.default_rng(0)
        compute = []
        speeds = []
        traces: dict[str, list[common_pb2.RequestTrace]] = {way: [] for way in WAYS}
        for repeat in range(repeats + 1):  # the first warms up
            for throttle in throttles.values():
                throttle.bytes_per_s = 0.0
            trace = await request(decode, prefills["serial"], rng)
            seconds = (trace.ttft_us - trace.exposed_us) / 1e6
            for throttle in throttles.values():
                throttle.bytes_per_s = trace.kv_bytes / seconds
            for way, address in prefills.items():
                trace = await request(decode, address, rng)
                if repeat:
                    traces[way].append(trace)
                    print(f"[{repeat}/{repeats}] {way}: {trace.exposed_us / 1000:.0f} ms exposed", file=sys.stderr)
            if repeat:
                compute.append(seconds)
                speeds.append(trace.kv_bytes / seconds)
    exposed = {way: statistics.median(t.exposed_us for t in result) / 1000 for way, result in traces.items()}
    return {
        "benchmark": "overlap",
        "tokens": TOKENS, "chunk": CHUNK, "kv_bytes": traces["serial"][0].kv_bytes,
        "link_mb_per_s": statistics.median(speeds) / 1e6,
        "compute_ms": statistics.median(compute) * 1000, "repeats": repeats,
        "exposed_ms": exposed,
        "ttft_ms": {way: statistics.median(t.ttft_us for t in result) / 1000 for way, result in traces.items()},
        "exposed_share_of_serial": {way: value / exposed["serial"] for way, value in exposed.items()},
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "load": os.getloadavg()[0]},
    }  # fmt: skip


async def request(decode: str, prefill: str, rng: np.random.Generator) -> common_pb2.RequestTrace:
    """Send a new prompt and wait for one token."""
    message = worker_pb2.GenerateRequest(
        request_id=rng.bytes(8).hex(),
        prompt_token_ids=pack_ids(rng.integers(3, VOCAB, TOKENS).tolist()),
        sampling=sampling_to_pb(SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)),
        prefill_candidates=[prefill],
        remote_prefill_threshold=1,
    )
    trace = common_pb2.RequestTrace()
    async with open_channel(decode) as channel:
        async for response in worker_pb2_grpc.WorkerServiceStub(channel).Generate(message):
            if response.HasField("trace"):
                trace.CopyFrom(response.trace)
    if trace.path != common_pb2.PREFILL_PATH_REMOTE or trace.failed_prefills:
        raise RuntimeError(f"the prefill was not remote: {trace}")
    return trace


if __name__ == "__main__":
    sys.exit(main())
