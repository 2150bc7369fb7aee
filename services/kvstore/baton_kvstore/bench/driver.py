"""Runs the benchmark: starts servers and clients, lets tiers and baselines take turns, and reports records."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from baton.bench.core.records import Record, ResultRecord
from baton.bench.kv.agents import OPEN_S, LocalAgent, ask_all
from baton.bench.kv.control import seconds, to_fields
from baton.bench.kv.source import require_memory
from baton.errors import BatonError, ConfigError
from baton.version import __version__
from baton_kvstore.bench.plan import DISK_MEMORY, Addresses, OpenSpec, Options, Plan, TurnSpec, make_plans
from baton_kvstore.bench.processes import RedisServer, Server, StoreServer, redis_obstacle
from baton_kvstore.bench.records import SCHEMA_VERSION, RatioRecord, RunRecord, UnavailableRecord, VerifyRecord
from baton_kvstore.bench.results import Cell, Sample, find_ratios, measure_record

EXIT_OK, EXIT_FAILED, EXIT_UNABLE, EXIT_TOO_SLOW = 0, 1, 2, 3
CLIENT_MODULE = "baton_kvstore.bench.client"
_TURN_S = 300.0
_LEAD_S = 0.03
"""From the order to the turn's start: all clients know of it by then."""
_REDIS = ("redis", "redis-mget", "redis-bare")
Report = Callable[[Record], None]
Step = Callable[[str], None]


@dataclass
class _Site:
    """One geometry's servers, and per method the place of the chain that is asked for next."""

    plan: Plan
    where: Addresses = field(default_factory=Addresses)
    servers: dict[str, Server] = field(default_factory=dict)
    at: dict[str, int] = field(default_factory=dict)

    def cpu_s(self) -> float:
        """CPU seconds of all of them."""
        return sum(server.cpu_s() for server in self.servers.values())

    def disk_bytes(self) -> int:
        """What the store whose disk is read has read of its files."""
        return self.servers["disk"].read_bytes() if "disk" in self.servers else 0


class Driver:
    """One run.

    Args:
        options: What to measure.
        report: Gets each record as soon as it is known.
        step: Told what runs now.
    """

    def __init__(self, options: Options, report: Report, step: Step) -> None:
        self._options, self._report, self._step = options, report, step
        self._failures: list[str] = []
        self._slow: list[str] = []
        self._redis = options.redis

    def run(self) -> int:
        """Measure everything; returns the exit status.

        Raises:
            ConfigError: It cannot be run as asked at all.
            BatonError: A client or a server ended.
        """
        started, options = time.perf_counter(), self._options
        plans = make_plans(options)
        for plan in plans:
            require_memory(plan.memory(options))
        self._report(_run_record(options, plans))
        if self._redis and (reason := redis_obstacle()):
            self._redis = False
            self._report(UnavailableRecord("redis", reason))
        try:
            with contextlib.ExitStack() as stack:
                agents = [self._agent(stack, i) for i in range(max(options.clients))]
                for plan in plans:
                    self._run_plan(plan, agents)
        except BatonError as error:
            code = EXIT_UNABLE if isinstance(error, ConfigError) else EXIT_FAILED
            self._report(ResultRecord(code, (error.message,), round(time.perf_counter() - started, 3)))
            raise
        code = EXIT_FAILED if self._failures else EXIT_TOO_SLOW if self._slow else EXIT_OK
        self._report(ResultRecord(code, (*self._failures, *self._slow), round(time.perf_counter() - started, 3)))
        return code

    def _agent(self, stack: contextlib.ExitStack, index: int) -> LocalAgent:
        return stack.enter_context(contextlib.closing(LocalAgent(f"client {index}", module=CLIENT_MODULE)))

    def _run_plan(self, plan: Plan, agents: Sequence[LocalAgent]) -> None:
        self._step(f"{plan.name}: starting and filling")
        with self._site(plan) as site:
            specs = [self._open_spec(site, i) for i in range(len(agents))]
            ask_all(agents, "open", OPEN_S, [{"spec": to_fields(spec)} for spec in specs])
            try:
                self._fill(site, agents)
                cells = self._cells()
                for turn in range(self._options.warmup + self._options.repeat):
                    for cell in cells:
                        self._step(f"{plan.name}: {cell.label}, round {turn + 1}")
                        sample = self._turn(site, cell, agents[: cell.clients])
                        if turn >= self._options.warmup:
                            cell.samples.append(sample)
                self._verify(plan, cells, agents)
            finally:
                ask_all(agents, "close", OPEN_S, [{}] * len(agents))
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
                places["dram"] = start("dram", StoreServer("dram", [*pipes, "--capacity-bytes", str(whole)]))
                if "put" in options.ops:
                    flags = [*pipes, "--capacity-bytes", str(part)]
                    places["dram_put"] = start("dram_put", StoreServer("dram-put", flags))
            if "disk" in options.tiers:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-", dir=options.dir))
                places["disk_path"] = str(Path(folder) / "get")
                for name in ("disk", "disk_put")[: 1 + ("put" in options.ops)]:
                    path = places["disk_path"] if name == "disk" else str(Path(folder) / "put")
                    flags = [*pipes, *_disk_flags(plan, path, part, options.disk_readers)]
                    places[name] = start(name, StoreServer(name.replace("_", "-"), flags))
            if self._redis:
                redis = RedisServer()
                start("redis", redis)
                places["redis"] = redis.port
            for server in site.servers.values():
                server.wait_ready()
            site.where = Addresses(**places)
            yield site

    def _open_spec(self, site: _Site, index: int) -> OpenSpec:
        plan, options = site.plan, self._options
        return OpenSpec(
            index=index,
            seed=options.seed,
            shape=plan.shape,
            blocks=plan.blocks,
            chains=plan.chains,
            redis_chains=plan.redis_chains,
            readers=options.disk_readers,
            where=site.where,
        )

    def _fill(self, site: _Site, agents: Sequence[LocalAgent]) -> None:
        helpers = agents[:2]  # no more than the store pulls from at once
        for what in ("dram", "disk", "redis"):
            if what in site.servers:
                ask_all(helpers, "fill", _TURN_S, [{"what": what, "clients": len(helpers)}] * len(helpers))

    def _cells(self) -> list[Cell]:
        """Return what takes turns, in order: those that are compared stand next to each other."""
        options, cells = self._options, []
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

    def _turn(self, site: _Site, cell: Cell, agents: Sequence[LocalAgent]) -> Sample:
        cpu, read, spec = site.cpu_s(), site.disk_bytes(), self._turn_spec(cell, site.at.get(cell.method, 0))
        answers = ask_all(agents, "turn", _TURN_S, [{"turn": to_fields(spec)}] * len(agents))
        cpu = site.cpu_s() - cpu + sum(seconds(answer, "cpu") for answer in answers)
        hits = [int(seconds(answer, "hits")) for answer in answers]
        site.at[cell.method] = spec.first + cell.clients * max(hits)
        return Sample(
            seconds=max(seconds(a, "end") for a in answers) - min(seconds(a, "start") for a in answers),
            blocks=sum(int(seconds(answer, "blocks")) for answer in answers),
            wanted=sum(hits) * site.plan.blocks,
            latencies=[float(value) for answer in answers for value in answer["seconds"]],
            cpu=cpu,
            disk_bytes=site.disk_bytes() - read,
        )

    def _turn_spec(self, cell: Cell, first: int) -> TurnSpec:
        start = time.monotonic() + _LEAD_S
        return TurnSpec(cell.method, cell.op, cell.clients, cell.hit_percent, first, start, self._options.seconds)

    def _verify(self, plan: Plan, cells: Sequence[Cell], agents: Sequence[LocalAgent]) -> None:
        """Have every byte compared that a tier serves, and of chains that are put and loaded again."""
        for cell in cells:
            if cell.method not in (*self._options.tiers, "redis-bare") or cell.op == "contains":
                continue
            if cell.hit_percent != 100 or cell.clients != max(same.clients for same in cells if _alike(same, cell)):
                continue
            # Of chains put by all at once some might be evicted before they are loaded.
            some = agents[: cell.clients if cell.op == "get" else min(cell.clients, DISK_MEMORY // 2)]
            answers = ask_all(some, "verify", _TURN_S, [{"turn": to_fields(self._turn_spec(cell, 0))}] * len(some))
            wrong, checked = (sum(int(seconds(a, name)) for a in answers) for name in ("wrong", "checked"))
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


def _run_record(options: Options, plans: Sequence[Plan]) -> RunRecord:
    machine = {
        "host": platform.node(),
        "cpus": os.cpu_count() or 0,
        "arch": platform.machine(),
        "kernel": platform.release(),
        "memory": psutil.virtual_memory().total,
        "load": round(os.getloadavg()[0], 2),
    }
    return RunRecord(
        schema=SCHEMA_VERSION,
        version=__version__,
        machine=machine,
        geometries=tuple(plan.name for plan in plans),
        block_size=options.block_size,
        kv_dtype=options.kv_dtype,
        tiers=options.tiers,
        ops=options.ops,
        clients=options.clients,
        hits=options.hits,
        total_bytes=options.total_bytes,
        disk_readers=options.disk_readers,
        warmup=options.warmup,
        repeat=options.repeat,
        seconds=options.seconds,
        seed=options.seed,
    )
