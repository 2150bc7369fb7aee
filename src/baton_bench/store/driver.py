"""Runs the benchmark: starts servers and clients, lets tiers and baselines take turns, and reports records."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from baton.child_process import ChildProcess, die_with_parent, start_python
from baton.errors import ConfigError, UnavailableError
from baton.rpc.channel import check_health
from baton.rpc.server import free_port
from baton.terminal import Step
from baton.version import __version__
from baton_bench.agents import Agent, Fields, ask_all, start_agent
from baton_bench.report import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_TOO_SLOW,
    Report,
    build_from,
    machine_facts,
    require_memory,
    run_with_result,
)
from baton_bench.store.plan import (
    DISK_MEMORY,
    Addresses,
    OpenSpec,
    Options,
    Plan,
    TurnResult,
    TurnSpec,
    VerifyResult,
    make_plans,
)
from baton_bench.store.records import (
    SCHEMA_VERSION,
    Cell,
    RatioRecord,
    RunRecord,
    Sample,
    UnavailableRecord,
    VerifyRecord,
    find_ratios,
    measure_record,
)

CLIENT_MODULE = "baton_bench.store.client"
_TURN_S = 300.0
_LEAD_S = 0.03
"""From the order to the turn's start: all clients know of it by then."""
_READY_S = 60.0
_END_S = 30.0
_REDIS = ("redis", "redis-mget", "redis-bare")


class Server:
    """A process that listens on a port of 127.0.0.1. Must be started on the main thread, with which it ends.

    Args:
        name: For error messages.
        process: The started server, whose output is a pipe.
        port: Port that it listens on.
        answers: Returns whether the server answers at an address.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], port: int, answers: Callable[[str], bool]) -> None:
        self.name = name
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self._answers = answers
        self._child = ChildProcess(process)

    def cpu_s(self) -> float:
        """CPU seconds that it has used; 0 if it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(self._child.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def read_bytes(self) -> int:
        """Bytes that it has read of files; 0 if it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return int(psutil.Process(self._child.pid).io_counters().read_chars)
        return 0

    def wait_ready(self) -> None:
        """Wait until it answers.

        Raises:
            UnavailableError: It ended, or took too long.
        """
        deadline = time.monotonic() + _READY_S
        while not self._answers(self.address):
            if self._child.returncode is not None:
                raise UnavailableError(f"{self.name} ended: {self._child.last_words(1.0)}")
            if time.monotonic() >= deadline:
                raise UnavailableError(f"{self.name} was not ready within {_READY_S:g} s")
            time.sleep(0.05)

    def close(self) -> None:
        self._child.stop(_END_S)


def start_store(name: str, flags: Sequence[str]) -> Server:
    """Start ``baton-kvstore`` with some flags."""
    port = free_port()
    words = ["--port", str(port), "--instance-id", name, "--log-level", "warning", *flags]
    process = start_python("baton_kvstore.main", words, end_with_thread=True, output=subprocess.PIPE)
    return Server(name, process, port, lambda address: asyncio.run(check_health(address)))


def start_redis() -> Server:
    port = free_port()
    flags = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")

    def answers(_: str) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return True
        return False

    process = subprocess.Popen(
        ["redis-server", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, signal.SIGKILL),
    )
    return Server("redis-server", process, port, answers)


def redis_obstacle() -> str:
    """Return why Redis cannot be measured here; empty: it can."""
    if shutil.which("redis-server") is None:
        return "no redis-server on this machine (apt-get install redis-server)"
    try:
        import redis  # noqa: F401
    except ImportError:
        return "its Python client is missing: pip install 'baton-serve[redis]'"
    return ""


@dataclass
class _Site:
    """One geometry's servers, and per method the index of the chain to request next."""

    plan: Plan
    where: Addresses = field(default_factory=Addresses)
    servers: dict[str, Server] = field(default_factory=dict)
    at: dict[str, int] = field(default_factory=dict)

    def cpu_s(self) -> float:
        """CPU seconds of all of them."""
        return sum(server.cpu_s() for server in self.servers.values())

    def disk_bytes(self) -> int:
        """Bytes that the disk store has read from its files."""
        return self.servers["disk"].read_bytes() if "disk" in self.servers else 0


class Driver:
    """One run.

    Args:
        options: Options of the command line.
        report: Gets each record as soon as it is known.
        step: Called with the name of each step and the number of steps left.
    """

    def __init__(self, options: Options, report: Report, step: Step) -> None:
        self._options = options
        self._report = report
        self._step = step
        self._failures: list[str] = []
        self._slow: list[str] = []
        self._redis = options.redis

    def run(self) -> int:
        """Measure everything; returns the exit status.

        Raises:
            ConfigError: The options cannot work together.
            BatonError: A client or a server ended.
        """
        plans = make_plans(self._options)
        for plan in plans:
            require_memory(plan.memory(self._options))
        return run_with_result(lambda: self._measure(plans), self._report)

    def _measure(self, plans: Sequence[Plan]) -> tuple[int, list[str]]:
        names = tuple(plan.name for plan in plans)
        about: dict[str, Any] = {"schema": SCHEMA_VERSION, "version": __version__, "machine": machine_facts()}
        self._report(build_from(RunRecord, self._options, geometries=names, **about))
        if self._redis and (reason := redis_obstacle()):
            self._redis = False
            self._report(UnavailableRecord("redis", reason))
        with contextlib.ExitStack() as stack:
            agents = [
                stack.enter_context(contextlib.closing(start_agent(f"client {i}", CLIENT_MODULE)))
                for i in range(max(self._options.clients))
            ]
            for plan in plans:
                self._run_plan(plan, agents)
        code = EXIT_FAILED if self._failures else EXIT_TOO_SLOW if self._slow else EXIT_OK
        return code, [*self._failures, *self._slow]

    def _run_plan(self, plan: Plan, agents: Sequence[Agent]) -> None:
        self._step(f"{plan.name}: starting and filling", 1)
        with self._site(plan) as site:
            specs = [
                OpenSpec(i, self._options.seed, plan, self._options.disk_readers, site.where)
                for i in range(len(agents))
            ]
            ask_all(agents, "open", Fields, each=[{"spec": spec} for spec in specs])
            try:
                self._fill(site, agents)
                cells = self._cells()
                rounds = self._options.warmup + self._options.repeat
                for turn in range(rounds):
                    for number, cell in enumerate(cells):
                        left = (rounds - turn) * len(cells) - number - 1
                        self._step(f"{plan.name}: {cell.label}, round {turn + 1}", left)
                        sample = self._turn(site, cell, agents[: cell.clients])
                        if turn >= self._options.warmup:
                            cell.samples.append(sample)
                self._verify(plan, cells, agents)
            finally:
                ask_all(agents, "close", Fields)
        for cell in cells:
            self._report(measure_record(plan, cell))
        for ratio in find_ratios(plan.name, cells):
            self._report(ratio)
            self._judge(ratio)

    @contextlib.contextmanager
    def _site(self, plan: Plan) -> Iterator[_Site]:
        options = self._options
        site = _Site(plan)
        with contextlib.ExitStack() as stack:

            def start(name: str, server: Server) -> str:
                site.servers[name] = server
                stack.callback(server.close)
                return server.address

            places: dict[str, Any] = {}
            whole, part = ((1 + count) * plan.chain_bytes for count in (plan.chains, plan.disk_memory_chains))
            pipes = ("--pipes", "shm,tcp")
            if {"shm", "tcp"} & set(options.tiers):
                places["dram"] = start("dram", start_store("dram", [*pipes, "--capacity-bytes", str(whole)]))
                if "put" in options.ops:
                    flags = [*pipes, "--capacity-bytes", str(part)]
                    places["dram_put"] = start("dram_put", start_store("dram-put", flags))
            if "disk" in options.tiers:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-", dir=options.dir))
                places["disk_path"] = str(Path(folder) / "get")
                for name in ("disk", "disk_put")[: 1 + ("put" in options.ops)]:
                    path = places["disk_path"] if name == "disk" else str(Path(folder) / "put")
                    flags = [*pipes, *_disk_flags(plan, path, part, options.disk_readers)]
                    places[name] = start(name, start_store(name.replace("_", "-"), flags))
            if self._redis:
                start("redis", start_redis())
                places["redis"] = site.servers["redis"].port
            for server in site.servers.values():
                server.wait_ready()
            site.where = Addresses(**places)
            yield site

    def _fill(self, site: _Site, agents: Sequence[Agent]) -> None:
        helpers = agents[:2]  # no more than the store pulls from at once
        for what in ("dram", "disk", "redis"):
            if what in site.servers:
                ask_all(helpers, "fill", Fields, _TURN_S, what=what, clients=len(helpers))

    def _cells(self) -> list[Cell]:
        """Return the cells of a round in order; cells that are compared are neighbours."""
        options = self._options
        cells = []
        for clients in options.clients:
            redis = (_REDIS if clients == 1 else _REDIS[:1]) if self._redis else ()
            alone = ("memcpy", *(("plain", "dd") if "disk" in options.tiers else ())) if clients == 1 else ()
            if "get" in options.ops:
                for hits in options.hits:
                    others = (*redis, *alone) if hits == 100 else redis[:1]
                    cells += [Cell(name, "get", clients, hits) for name in (*options.tiers, *others)]
            if "put" in options.ops:
                cells += [Cell(name, "put", clients, 100) for name in (*options.tiers, *redis[:1])]
            if "contains" in options.ops:
                tiers = [name for name in options.tiers if name != "tcp"]  # no pipe takes part in it
                cells += [Cell(name, "contains", clients, 100) for name in (*tiers, *redis[:1])]
        return cells

    def _turn(self, site: _Site, cell: Cell, agents: Sequence[Agent]) -> Sample:
        cpu = site.cpu_s()
        read = site.disk_bytes()
        spec = self._turn_spec(cell, site.at.get(cell.method, 0))
        results = ask_all(agents, "turn", TurnResult, _TURN_S, turn=spec)
        cpu = site.cpu_s() - cpu + sum(result.cpu for result in results)
        hits = [result.hits for result in results]
        site.at[cell.method] = spec.first + cell.clients * max(hits)
        return Sample(
            seconds=max(result.end for result in results) - min(result.start for result in results),
            blocks=sum(result.blocks for result in results),
            wanted=sum(hits) * site.plan.blocks,
            latencies=[value for result in results for value in result.seconds],
            cpu=cpu,
            disk_bytes=site.disk_bytes() - read,
        )

    def _turn_spec(self, cell: Cell, first: int) -> TurnSpec:
        start = time.monotonic() + _LEAD_S
        return TurnSpec(cell.method, cell.op, cell.clients, cell.hit_percent, first, start, self._options.seconds)

    def _verify(self, plan: Plan, cells: Sequence[Cell], agents: Sequence[Agent]) -> None:
        """Have every byte compared that a tier serves, and of chains that are put and loaded again."""
        for cell in cells:
            if cell.method not in (*self._options.tiers, "redis-bare") or cell.op == "contains":
                continue
            if cell.hit_percent != 100 or cell.clients != max(same.clients for same in cells if _alike(same, cell)):
                continue
            # Of chains put by all at once some might be evicted before they are loaded.
            some = agents[: cell.clients if cell.op == "get" else min(cell.clients, DISK_MEMORY // 2)]
            results = ask_all(some, "verify", VerifyResult, _TURN_S, turn=self._turn_spec(cell, 0))
            wrong = sum(result.wrong for result in results)
            checked = sum(result.checked for result in results)
            self._report(VerifyRecord(plan.name, cell.method, cell.op, checked, wrong))
            if wrong or not checked:
                what = f"{wrong} of {checked} blocks were wrong" if checked else "nothing came back"
                self._failures.append(f"{plan.name}, {cell.label}: {what}")

    def _judge(self, ratio: RatioRecord) -> None:
        options = self._options
        needed = {
            "memcpy": options.require_dram,
            "dd": options.require_disk,
            "plain reads": options.require_disk,
            "Redis": options.require_redis,
        }
        wanted = needed.get(ratio.name.rpartition(" / ")[2])
        if wanted is not None and ratio.value < wanted:
            self._slow.append(f"{ratio.geometry}: {ratio.name} is {ratio.value:.2f}, {wanted:g} was required")


def _alike(one: Cell, other: Cell) -> bool:
    return (one.method, one.op) == (other.method, other.op)


def _disk_flags(plan: Plan, path: str, memory: int, readers: int) -> list[str]:
    # All of the chains, as much again for records and segments that are not full yet, and a segment to write into.
    room = 2 * plan.chains * plan.chain_bytes + (1 << 30)
    if shutil.disk_usage(Path(path).parent).free < 2 * room:
        raise ConfigError(f"{Path(path).parent} has no room for {2 * room} bytes", field="dir")
    flags = {"capacity-bytes": memory, "disk-path": path, "disk-bytes": room, "disk-readers": readers}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))] + ["--disk-write", "all"]
