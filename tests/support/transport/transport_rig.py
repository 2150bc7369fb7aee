"""Pipes of every kind, and a source and a target arena, for the transport's tests."""

from __future__ import annotations

import functools
import gc
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.servers.certificates import Authority
from tests.support.transport.fake_device import OpenStandInArena

from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.blocks import (
    BlockFetcher,
    BlockServer,
    BlockSource,
    Endpoint,
    LinkOptions,
    ServerOptions,
    TcpOptions,
)
from baton.kv_transfer.pipes.base import MemoryNetwork
from baton.kv_transfer.streams import Wait, connect_tcp, connect_unix
from baton.rpc.tls import Tls
from baton.types import InstanceId


def soon(seconds: float = 240.0) -> float:
    return time.monotonic() + seconds


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(call)
    finally:
        pool.shutdown(wait=False)


def open_fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def lets_go(fds: int, threads: int | None = None) -> bool:
    """Wait until no more descriptors are open, and no more threads run, than so many; some end in the background."""
    deadline = soon()
    while open_fds() > fds or (threads is not None and threading.active_count() > threads):
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.01)
    return True


def connect_raw(kind: str, address: str) -> Any:
    if kind in {"shm", "cuda_ipc"}:
        return connect_unix(address.rsplit("/", 1)[1], Wait(soon()))
    return connect_tcp(address, Wait(soon()))


LAYOUT = KVLayout((LayerShape(2, 16, 16), LayerShape(2, 16, 8)), 16, "float32")


PRINT = Fingerprint.of(model="tiny", model_digest="d" * 64, rope="r", layout=LAYOUT)


KINDS: list[Any] = [
    ("memory", 1),
    ("shm", 1),
    ("tcp", 1),
    ("tcp", 3),
    ("tls", 1),
    ("tls", 3),
    ("nixl", 1),
    ("gloo", 1),
    ("file", 1),
    ("cuda_ipc", 1),
]
"""Kinds of pipe and connections; ``file`` is that of another package (:mod:`tests.support.transport.file_pipe`)."""
HOST_KINDS: list[Any] = [kind for kind in KINDS if kind[0] != "cuda_ipc"]
"""Those that go from host memory to host memory; the others are in ``tests/contract/test_device_arenas.py``."""


@functools.cache
def certificates() -> Tls:
    """One authority and certificate for all tests of this process."""
    with tempfile.TemporaryDirectory() as root:
        made = Authority(Path(root) / "authority").issue("pipes")
        files = Tls(made.cert, made.key, made.ca)
        files.pipe_context(server_side=True)  # both are read now, while the files are there
        files.pipe_context(server_side=False)
        return files


def tls_of(kind: str) -> Tls | None:
    return certificates() if kind == "tls" else None


class Rig:
    """A source arena full of random bytes behind a server, and a target arena with a fetcher."""

    def __init__(self, kind: str, streams: int = 1, num_blocks: int = 200, layout: KVLayout = LAYOUT) -> None:
        self.kind = kind
        self.sockets: list[socket.socket] = []
        self.network = MemoryNetwork()
        arena = OpenStandInArena if kind == "cuda_ipc" else HostArena
        self.source_arena = arena(num_blocks, layout.block_bytes)
        self.target = arena(num_blocks + 17, layout.block_bytes)
        rng = np.random.default_rng(7)
        self.source_arena.blocks[:] = rng.integers(0, 256, self.source_arena.blocks.shape, dtype=np.uint8)
        self.source_arena.generations[:] = rng.integers(0, 1 << 63, num_blocks, dtype=np.uint64)
        self.print = Fingerprint.of(model="tiny", model_digest="d" * 64, rope="r", layout=layout)
        self.server = self.serve()
        self.fetcher = BlockFetcher(
            self.target,
            self.print,
            kinds=(kind,),
            links=LinkOptions(
                tcp=TcpOptions(streams, share_bytes=1, streams_on_host=streams),
                memory=self.network,
                tls=tls_of(kind),
            ),
        )

    def serve(self, **options: Any) -> BlockServer:
        return BlockServer(
            self.source_arena,
            self.print,
            InstanceId("p0"),
            kinds=(self.kind,),
            options=ServerOptions(memory=self.network, **({"tls": tls_of(self.kind)} | options)),
        )

    def fetch(self, remote: Any, local: Any, *, generations: Any = None, **options: Any) -> Any:
        if generations is None:
            generations = self.source_arena.generations[np.asarray(remote, dtype=np.int64)]
        arguments = {"deadline": soon()} | options
        return self.fetcher.fetch(self.server.source, remote, generations, local, **arguments)

    def same(self, remote: Any, local: Any) -> bool:
        return bool((self.target.blocks[np.asarray(local)] == self.source_arena.blocks[np.asarray(remote)]).all())

    def close(self) -> None:
        self.fetcher.close()
        self.server.close()
        for sock in self.sockets:
            sock.close()
        self.source_arena.close()
        self.target.close()


def silent_source(rig: Rig) -> BlockSource:
    """A source whose TCP endpoint accepts (the kernel does) and never says a word."""
    listener = socket.create_server(("127.0.0.1", 0))
    rig.sockets.append(listener)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    source = rig.server.source
    return BlockSource(
        source.instance_id, source.epoch, (Endpoint("tcp", address),), source.fingerprint, source.num_blocks
    )
