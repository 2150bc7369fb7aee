"""Agents that move the same bytes without Baton: plain NIXL, plain gloo. ``python -m baton_bench.kv.rivals``.

They follow their own documentation, in its fastest form: NIXL without progress thread and with everything that can
be prepared beforehand prepared, gloo with one message per contiguous run. UCX reads its settings when it starts, so
the driver starts a pair of agents for each set of settings. They listen on loopback only.
"""

from __future__ import annotations

import datetime
import importlib
import select
import socket
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from baton.errors import ConfigError, InvalidRequestError, TransferError
from baton.kv_cache.arena import Arena, MemoryRange, memory_range
from baton.kv_transfer.pipes.nixl_agent import error_types, segment_type
from baton_bench.agents import Fields, Line, Order, serve_agent
from baton_bench.kv.memory import new_arena
from baton_bench.kv.plan import RunResult, RunSpec, chosen

NATIVE = {"UCX_MODULES": "^ib", "UCX_NET_DEVICES": "lo", "UCX_MM_ERROR_HANDLING": "y"}
"""UCX as it chooses on one host: shared memory and CMA."""
OVER_TCP = {**NATIVE, "UCX_TLS": "tcp", "UCX_TCP_TX_SEG_SIZE": "256K", "UCX_TCP_RX_SEG_SIZE": "256K"}
"""UCX over sockets, with the segments that make it fast."""
QUIET = {"UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}
RIVALS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "nixl-bare": ("nixl", {**NATIVE, **QUIET}),
    "nixl-tcp-bare": ("nixl", {**OVER_TCP, **QUIET}),
    "gloo-bare": ("gloo", {}),
}
"""Name of each rival, the pipe that it is compared with, and its environment."""
DEVICE_RIVALS = ("nixl-bare",)
"""Rivals that support device memory: gloo does not, and UCX over sockets copies it to the host before."""
Count = Annotated[int, msgspec.Meta(ge=0)]
_PATIENCE_S = 60.0
_SPINS = 64
_MAX_BYTES = 1 << 32
_SOURCE_OWNER = 0
_TARGET_OWNER = 1 << 20


class Rival:
    """One end of a pair; the driver makes one the source and one the target.

    Args:
        line: The control line, watched while the source attends to its reader.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._end: NixlEnd | GlooEnd | None = None
        self._seed = 0

    def orders(self) -> Mapping[str, Order]:
        """Return what it can be ordered to do, by name."""
        return {
            "open": self._open,
            "meet": self._meet,
            "attend": self._attend,
            "run": self._run,
            "cpu": lambda: {"cpu": time.process_time()},
            "stop": lambda: {},
        }

    def close(self) -> None:
        if self._end is not None:
            self._end.close()

    def _open(self, kind: str, role: str, num_blocks: Count, block_bytes: Count, seed: Count, memory: str) -> Fields:
        if not 0 < num_blocks * block_bytes <= _MAX_BYTES:
            raise InvalidRequestError("a rival's memory is bounded to 4 GiB", field="num_blocks")
        arena = new_arena(memory, num_blocks, block_bytes)
        arena.touch()
        self._end = (NixlEnd if kind == "nixl" else GlooEnd)(arena, role)
        self._seed = seed
        return {"card": self._end.card()}

    def _meet(self, card: Fields) -> None:
        self._opened().meet(card)

    def _attend(self, run: RunSpec) -> None:
        """Make progress for the reader until the driver sends an order."""
        poller = select.poll()
        end = self._opened()
        poller.register(self._line.stream.sock, select.POLLIN)
        end.attend(run, chosen(run, end.arena.num_blocks, self._seed, _SOURCE_OWNER))
        while not (self._line.has_received or poller.poll(0)):
            for _ in range(_SPINS):
                end.progress()

    def _run(self, run: RunSpec) -> RunResult:
        end = self._opened()
        count = end.arena.num_blocks
        seed = self._seed
        remote = chosen(run, count, seed, _SOURCE_OWNER)
        local = chosen(run, count, seed, _TARGET_OWNER)
        order = np.argsort(remote, kind="stable")
        go = end.prepare(run, remote[order], local[order])
        cpu = time.process_time()
        start = time.monotonic()
        go()
        stop = time.monotonic()
        cpu = time.process_time() - cpu
        return RunResult(start, stop, run.blocks * end.arena.block_bytes, cpu)

    def _opened(self) -> NixlEnd | GlooEnd:
        if self._end is None:
            raise InvalidRequestError("nothing is open", field="do")
        return self._end


class NixlEnd:
    """An agent with the UCX backend and its arena registered.

    Raises:
        ConfigError: NIXL is not installed, or UCX does not start.
    """

    def __init__(self, arena: Arena, role: str) -> None:
        self.arena = arena
        self._peer = ""
        self._prepared: dict[RunSpec, Any] = {}
        try:
            api = importlib.import_module("nixl_cu12._api")
        except ImportError as error:
            raise ConfigError(
                f"NIXL is not installed ({error}): pip install 'baton-serve[nixl]'", field="pipe"
            ) from error
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        try:
            self._agent: Any = api.nixl_agent(f"bench-{role}", config)
            self._agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        except RuntimeError as error:
            raise ConfigError(f"NIXL's UCX does not start: {error}", field="pipe") from error
        self._here = memory_range(arena)
        self._there = MemoryRange(0, 0)
        rows = [(self._here.address, self._here.size, self._here.device or 0, "")]
        try:
            self._memory = self._agent.register_memory(rows, mem_type=segment_type(self._here))
        except error_types(api) as error:
            raise ConfigError(f"NIXL cannot register {self._here}: {error}", field="pipe") from error

    def card(self) -> Fields:
        """Return what the peer needs to know."""
        here = self._here
        metadata = self._agent.get_agent_metadata().hex()
        return {"metadata": metadata, "base": here.address, "device": -1 if here.device is None else here.device}

    def meet(self, card: Fields) -> None:
        """Get to know the peer."""
        peer = self._agent.add_remote_agent(bytes.fromhex(str(card.get("metadata"))))
        self._peer = peer.decode() if isinstance(peer, bytes) else str(peer)
        device = _integer(card, "device", least=-1)
        self._there = MemoryRange(_integer(card, "base"), self._here.size, None if device < 0 else device)

    def attend(self, spec: RunSpec, remote: Any) -> None:
        """Nothing has to be sent: reads are one-sided."""

    def progress(self) -> None:
        """Let UCX answer its reader."""
        self._agent.get_new_notifs()

    def prepare(self, spec: RunSpec, remote: Any, local: Any) -> Any:
        """Return a call that reads the blocks."""
        if spec not in self._prepared:
            sides = (("NIXL_INIT_AGENT", self._here, local), (self._peer, self._there, remote))
            lists = [
                self._agent.prep_xfer_dlist(name, self._rows(where, ids, spec.shuffled), segment_type(where))
                for name, where, ids in sides
            ]
            indices = np.arange(spec.blocks if spec.shuffled else 1, dtype=np.int32)
            self._prepared[spec] = self._agent.make_prepped_xfer("READ", lists[0], indices, lists[1], indices, b"")
        handle = self._prepared[spec]

        def transfer() -> None:
            state = self._agent.transfer(handle)
            deadline = time.monotonic() + _PATIENCE_S
            while state == "PROC":
                state = self._agent.check_xfer_state(handle)
                if time.monotonic() > deadline:
                    raise TransferError("a plain NIXL read did not end")
            if state != "DONE":
                raise TransferError(f"a plain NIXL read ended as {state}")

        return transfer

    def close(self) -> None:
        for handle in self._prepared.values():
            self._agent.release_xfer_handle(handle)
        if self._peer:
            self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._memory)

    def _rows(self, where: MemoryRange, ids: Any, shuffled: bool) -> Any:
        size = self.arena.block_bytes
        device = where.device or 0
        if not shuffled:  # one run of neighbours: one descriptor
            return np.array([[where.address + int(ids[0]) * size, len(ids) * size, device]], dtype=np.uint64)
        starts = np.uint64(where.address) + ids.astype(np.uint64) * np.uint64(size)
        return np.stack([starts, *(np.full(len(ids), each, np.uint64) for each in (size, device))], axis=1)


class GlooEnd:
    """A process group of two over loopback.

    Raises:
        ConfigError: torch was built without gloo.
    """

    def __init__(self, arena: Arena, role: str) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
            self._c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
            self._make: Any = self._c10d.ProcessGroupGloo
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"gloo is not there: {error}", field="pipe") from error
        self.arena = arena
        self._rank = 0 if role == "source" else 1
        self._listener = socket.create_server(("127.0.0.1", 0)) if self._rank == 0 else None
        self._store: Any = None
        self._group: Any = None
        if self._listener is not None:
            port = self._listener.getsockname()[1]
            self._store = self._torch.distributed.TCPStore(
                "127.0.0.1", port, 2, True, wait_for_workers=False, master_listen_fd=self._listener.detach()
            )

    def card(self) -> Fields:
        """Return what the peer needs to know."""
        return {"port": 0 if self._store is None else self._store.port}

    def meet(self, card: Fields) -> None:
        """Make the group; returns once the peer has too."""
        if self._store is None:
            self._store = self._torch.distributed.TCPStore("127.0.0.1", _integer(card, "port"), 2, False)
        options = self._make._Options()
        options._devices = [self._make.create_device(hostname="127.0.0.1")]
        options._timeout = datetime.timedelta(seconds=_PATIENCE_S)
        options._threads = 1
        self._group = self._make(self._store, self._rank, 2, options)

    def attend(self, spec: RunSpec, remote: Any) -> None:
        """Send the blocks, in the order of their ids, a message per run."""
        remote = np.sort(remote)
        works = [self._group.send([part], 1, 0) for part in self._parts(remote, spec.shuffled)]
        for work in works:
            work.wait()

    def progress(self) -> None:
        """Nothing waits for it: gloo has its own thread."""
        time.sleep(0)

    def prepare(self, spec: RunSpec, remote: Any, local: Any) -> Any:
        """Return a call that receives the blocks."""
        parts = self._parts(local, spec.shuffled)

        def transfer() -> None:
            for work in [self._group.recv([part], 0, 0) for part in parts]:
                work.wait()

        return transfer

    def close(self) -> None:
        self._group = None

    def _parts(self, ids: Any, shuffled: bool) -> list[Any]:
        blocks = self._torch.from_numpy(self.arena.blocks)
        return [blocks[i] for i in ids.tolist()] if shuffled else [blocks[int(ids[0]) : int(ids[-1]) + 1].reshape(-1)]


def _integer(fields: Fields, name: str, least: int = 0) -> int:
    value = fields.get(name)
    if type(value) is not int or value < least:
        raise InvalidRequestError(f"{name} must be a number", field=name)
    return value


if __name__ == "__main__":
    sys.exit(serve_agent(lambda _host, _token, line: Rival(line)))
