"""Bytes per second of block transfer between two processes, against one thread's memcpy and a bare socket loop.

    python benchmarks/transfer.py [--rounds 9] [--json benchmarks/results/transfer.json]

Two shapes: one contiguous run of 256 MiB, and 4096 blocks of 32 KiB in random order on both sides. All memory is
touched before. Every round measures every method once, in turn, so that a busy machine disturbs all alike; the
ratios are medians over the rounds. A transfer ends when the bytes lie in the target pool and the reader knows that
they are valid.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from baton.kv.arena import KVArena
from baton.kv.fingerprint import Fingerprint
from baton.kv.layout import KVLayout, LayerShape
from baton.transport.blocks import BlockFetcher, BlockServer, BlockSource, Endpoint
from baton.transport.copying import BlockCopier
from baton.types import Epoch, InstanceId

BLOCK_BYTES = 32 << 10
TOTAL_BYTES = 256 << 20
NUM_BLOCKS = TOTAL_BYTES // BLOCK_BYTES
NUM_SCATTERED = 4096
LAYOUT = KVLayout((LayerShape(4, 64, 64),), 16, "float32")
FINGERPRINT = Fingerprint.of(model="bench", model_digest="0", rope="", layout=LAYOUT)


def serve() -> None:
    """Be the source process: a block server, and a socket that sends the whole pool to whoever sends a byte."""
    arena = KVArena(NUM_BLOCKS, BLOCK_BYTES)
    arena.blocks[:] = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    server = BlockServer(arena, FINGERPRINT, InstanceId("source"))
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_send_bare, args=(listener, arena), daemon=True).start()
    about = {
        "epoch": arena.epoch.hex(),
        "endpoints": [[e.kind, e.address] for e in server.endpoints],
        "bare": listener.getsockname()[1],
    }
    print(json.dumps(about), flush=True)
    sys.stdin.read()
    server.close()


def _send_bare(listener: socket.socket, arena: KVArena) -> None:
    client, _ = listener.accept()
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while request := client.recv(8):
        client.sendall(arena.blocks.reshape(-1).data[: int.from_bytes(request, "little")])


@contextlib.contextmanager
def source_process() -> Iterator[dict[str, Any]]:
    """Run the source process."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.communicate(timeout=20)


def methods(about: dict[str, Any], target: KVArena, streams: int) -> dict[str, tuple[Callable[[], None], int]]:
    """Every method by name, with the bytes it moves."""
    here = KVArena(NUM_BLOCKS, BLOCK_BYTES)
    here.touch()
    target.touch()
    rng = np.random.default_rng(1)
    scattered = rng.permutation(NUM_BLOCKS)[:NUM_SCATTERED], rng.permutation(NUM_BLOCKS)[:NUM_SCATTERED]
    ids = np.arange(NUM_BLOCKS)
    endpoints = tuple(Endpoint(kind, address) for kind, address in about["endpoints"])
    source = BlockSource(InstanceId("source"), Epoch(bytes.fromhex(about["epoch"])), endpoints, FINGERPRINT, NUM_BLOCKS)
    fetchers = {
        "shm": BlockFetcher(target, FINGERPRINT, kinds=("shm",)),
        "tcp": BlockFetcher(target, FINGERPRINT, kinds=("tcp",)),
        f"tcp x{streams}": BlockFetcher(target, FINGERPRINT, kinds=("tcp",), streams=streams),
    }
    bare = socket.create_connection(("127.0.0.1", about["bare"]))

    def fetch(kind: str, remote: Any, local: Any) -> None:
        generations = np.zeros(len(remote), dtype=np.uint64)
        result = fetchers[kind].fetch(source, remote, generations, local, deadline=time.monotonic() + 60)
        assert result.valid.all(), "a block was not valid"

    def memcpy() -> None:
        ctypes.memmove(target.blocks.ctypes.data, here.blocks.ctypes.data, TOTAL_BYTES)

    def memcpy_scattered() -> None:
        to, start = target.blocks.ctypes.data, here.blocks.ctypes.data
        for local, remote in zip(*(side.tolist() for side in scattered), strict=True):
            ctypes.memmove(to + local * BLOCK_BYTES, start + remote * BLOCK_BYTES, BLOCK_BYTES)

    def bare_socket(size: int) -> None:
        bare.sendall(size.to_bytes(8, "little"))
        view, at = target.blocks.reshape(-1).data, 0
        while at < size:
            at += bare.recv_into(view[at:size])

    some = NUM_SCATTERED * BLOCK_BYTES
    out: dict[str, tuple[Callable[[], None], int]] = {
        "memcpy contiguous": (memcpy, TOTAL_BYTES),
        "memcpy scattered": (memcpy_scattered, some),
        "socket contiguous": (lambda: bare_socket(TOTAL_BYTES), TOTAL_BYTES),
        "socket 128 MiB": (lambda: bare_socket(some), some),
    }
    for kind in fetchers:
        out[f"{kind} contiguous"] = (lambda kind=kind: fetch(kind, ids, ids), TOTAL_BYTES)
        out[f"{kind} scattered"] = (lambda kind=kind: fetch(kind, *scattered), some)
    return out


def measure(rounds: int, streams: int) -> dict[str, Any]:
    """Run everything; returns GB/s (median and best) per method, and the ratios that matter."""
    target = KVArena(NUM_BLOCKS, BLOCK_BYTES)
    with source_process() as about:
        todo = methods(about, target, streams)
        for call, _ in todo.values():
            call()
        rates: dict[str, list[float]] = {name: [] for name in todo}
        for _ in range(rounds):
            for name, (call, size) in todo.items():
                start = time.perf_counter()
                call()
                rates[name].append(size / (time.perf_counter() - start) / 1e9)

    def ratio(name: str, base: str) -> float:
        return round(statistics.median(a / b for a, b in zip(rates[name], rates[base], strict=True)), 3)

    return {
        "gb_per_s": {name: {"median": _median(r), "best": round(max(r), 2)} for name, r in rates.items()},
        "ratios": {
            "shm contiguous / memcpy contiguous": ratio("shm contiguous", "memcpy contiguous"),
            "shm scattered / memcpy contiguous": ratio("shm scattered", "memcpy contiguous"),
            "shm scattered / memcpy scattered": ratio("shm scattered", "memcpy scattered"),
            "tcp contiguous / socket contiguous": ratio("tcp contiguous", "socket contiguous"),
            "tcp scattered / socket 128 MiB": ratio("tcp scattered", "socket 128 MiB"),
            f"tcp x{streams} contiguous / socket contiguous": ratio(f"tcp x{streams} contiguous", "socket contiguous"),
        },
        "rounds": rounds,
        "block_bytes": BLOCK_BYTES,
        "copier": BlockCopier().method,
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine()},
    }


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    results = measure(args.rounds, args.streams)
    for name, rate in results["gb_per_s"].items():
        print(f"{name:24} {rate['median']:6.2f} GB/s median {rate['best']:6.2f} best")
    for name, value in results["ratios"].items():
        print(f"{name:48} {value:.2f}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
