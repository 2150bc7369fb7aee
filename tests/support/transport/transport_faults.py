"""Things that break: a proxy that cuts and garbles, a process to kill, a flag that acts."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.support.child_env import child_env

from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.blocks import BlockSource, Endpoint
from baton.types import Epoch, InstanceId

FAULTS = ("cut", "delay", "stall", "corrupt", "truncate")
STALL_S = 0.4
"""Patience of who reads; a stall lasts longer, a delay half as long at most."""
_STALLED_S = 480.0

Change = Callable[[int, bytes], bytes]

LAYOUT = KVLayout((LayerShape(4, 64, 64),) * 2, 16, "float32")  # 64 KiB


BIG = KVLayout((LayerShape(8, 128, 128),) * 8, 16, "float32")  # 1 MiB


SERVER = """
import json, sys
import numpy as np
from baton.kv_cache.arena import HostArena
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout, LayerShape
from baton.kv_transfer.blocks import BlockServer
from baton.types import InstanceId

num_blocks, heads, dim, layers = (int(a) for a in sys.argv[1:5])
kinds = sys.argv[5].split(",")
layout = KVLayout((LayerShape(heads, dim, dim),) * layers, 16, "float32")
arena = HostArena(num_blocks, layout.block_bytes)
arena.blocks[:] = np.arange(num_blocks, dtype=np.uint8)[:, None]
arena.generations[:] = np.arange(num_blocks) + 1000
fingerprint = Fingerprint.of(model="m", model_digest="d", rope="r", layout=layout)
server = BlockServer(arena, fingerprint, InstanceId("p0"), kinds=kinds)
endpoints = [[e.kind, e.address] for e in server.endpoints]
print(json.dumps({"epoch": arena.epoch.hex(), "endpoints": endpoints}), flush=True)
sys.stdin.read()
server.close()
"""


def fingerprint(layout: KVLayout) -> Fingerprint:
    return Fingerprint.of(model="m", model_digest="d", rope="r", layout=layout)


def soon(seconds: float = 240.0) -> float:
    return time.monotonic() + seconds


class Process:
    """A serving process; block i is full of i, its generation is 1000 + i."""

    def __init__(self, layout: KVLayout, num_blocks: int, *, kinds: str = "shm,tcp") -> None:
        shape = layout.layers[0]
        arguments = [num_blocks, shape.kv_heads, shape.k_dim, len(layout.layers), kinds]
        self.popen = subprocess.Popen(
            [sys.executable, "-c", SERVER, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_env(),
        )
        assert self.popen.stdout is not None
        said = json.loads(self.popen.stdout.readline())
        endpoints = tuple(Endpoint(kind, address) for kind, address in said["endpoints"])
        self.source = BlockSource(
            InstanceId("p0"), Epoch(bytes.fromhex(said["epoch"])), endpoints, fingerprint(layout), num_blocks
        )

    def address(self, kind: str) -> str:
        return next(e.address for e in self.source.endpoints if e.kind == kind)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(240)

    def stop(self) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.communicate(timeout=10)
        self.kill()
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.close()
        self.popen.stdout.close()


class Proxy:
    """A TCP proxy that does something to the bytes from the server, counted over each connection.

    ``change(at, data)`` gets every piece and its offset and returns what to pass on; after ``cut_at`` bytes the
    connection is cut. ``asked`` does the same to the bytes from the client.
    """

    def __init__(
        self,
        target: str,
        change: Callable[[int, bytes], bytes] = lambda at, data: data,
        *,
        cut_at: int = 1 << 62,
        asked: Callable[[int, bytes], bytes] | None = None,
    ) -> None:
        self._asked = asked
        host, port = target.rsplit(":", 1)
        self._target, self._change, self._cut_at = (host, int(port)), change, cut_at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def source(self, source: BlockSource) -> BlockSource:
        """The same source, reached through the proxy."""
        return BlockSource(
            source.instance_id, source.epoch, (Endpoint("tcp", self.address),), source.fingerprint, source.num_blocks
        )

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [client, server]
            for arguments in ((client, server, self._asked), (server, client, self._change)):
                thread = threading.Thread(target=self._pump, args=arguments, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, target: socket.socket, change: Any) -> None:
        at = 0
        try:
            while data := source.recv(64 << 10):
                cut_at = self._cut_at if change is self._change else 1 << 62
                target.sendall(data if change is None else change(at, data)[: cut_at - at])
                at += len(data)
                if at >= cut_at:
                    break
        except OSError:
            pass  # the other direction was cut
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(240)
            assert not thread.is_alive()


class Hook:
    """A cancel flag that does something the n-th time it is looked at."""

    def __init__(self, at: int, act: Callable[[], object]) -> None:
        self._left, self._act = at, act
        self.acted = False

    def is_set(self) -> bool:
        self._left -= 1
        if self._left == 0:
            self.acted = True
            self._act()
        return False


def counting_proxy(target: str) -> tuple[Proxy, list[int]]:
    """A proxy that changes nothing, and the bytes of its longest connection: from the server, and to it."""
    seen = [0, 0]

    def count(which: int) -> Change:
        def change(at: int, data: bytes) -> bytes:
            seen[which] = max(seen[which], at + len(data))
            return data

        return change

    return Proxy(target, count(0), asked=count(1)), seen


class Fault:
    """What one seed does to a connection: a kind of fault, a direction and a place, all at random."""

    def __init__(self, seed: int, sizes: tuple[int, int]) -> None:
        rng = random.Random(seed)
        self.kind = rng.choice(FAULTS)
        self.asked = rng.random() < 0.25
        size = sizes[self.asked]
        # The handshake and the headers are a small part of the bytes: every third fault is aimed at them.
        self.at = rng.randrange(min(size, 3000)) if rng.random() < 0.33 else rng.randrange(size)
        self.count = rng.choice((1, 7, 4096))
        self.flip = rng.randrange(1, 256)
        self.pause_s = rng.uniform(0.01, STALL_S / 2)
        self.release = threading.Event()
        self.struck = False

    def __str__(self) -> str:
        return f"{self.kind} at {self.at} {'to' if self.asked else 'from'} the prefill instance"

    def change(self, at: int, data: bytes) -> bytes:
        """Pass a piece of the stream on, or what is left of it."""
        if not at <= self.at < at + len(data) or self.struck:
            return data
        self.struck = True
        inside = self.at - at
        if self.kind == "cut":
            raise ConnectionResetError("cut")
        if self.kind == "delay":
            self.release.wait(self.pause_s)
        elif self.kind == "stall":
            self.release.wait(_STALLED_S)
        elif self.kind == "corrupt":
            changed = bytearray(data)
            for i in range(inside, min(len(data), inside + self.count)):
                changed[i] ^= self.flip
            return bytes(changed)
        elif self.kind == "truncate":
            return data[:inside] + data[inside + self.count :]
        return data

    def proxy(self, target: str) -> Proxy:
        """Stand between a reader and its source."""
        return Proxy(target, asked=self.change) if self.asked else Proxy(target, self.change)
