"""A deployment that faults strike: 2P2D, two routers over Redis, a KV store over disk and Redis, proxies between them.

What others dial is a proxy on 127.0.0.2 under the port that the process itself has on 127.0.0.1, so that a network
between hosts can be played: each instance's and the store's gRPC and KV ports, and Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import mmap
import os
import re
import signal
import ssl
import struct
import subprocess
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
import psutil
from tests.chaos.credentials import Credentials
from tests.chaos.workload import MODEL
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.tcp_proxy import TcpProxy
from tests.support.servers.warm import WarmStarter

from baton.cli import supervisor
from baton.cli.plan import ExtraArgs, Ratio, make_plan
from baton.cli.supervisor import DeploymentPlan, ProcessSpec, Supervisor
from baton.client import AsyncClient
from baton.errors import BatonError
from baton.kv_transfer.pipes.nixl_agent import nixl_obstacle
from baton.rpc.server import free_ports

PEERS = "127.0.0.2"
REDIS = "redis"
KV_BLOCKS = 400
SETTLED_S = 240.0
SLACK_DESCRIPTORS, SLACK_THREADS, SLACK_BYTES = 40, 24, 192 << 20
"""What a process may have beyond what it had after some work: pools grow to their bounds, and then no more."""
_CLOCK_SLOTS = 32768
_DISK_BYTES = 24 << 20


@dataclass(frozen=True)
class Shape:
    """What differs between deployments.

    Attributes:
        pipes: For KV, in order of preference.
        prefill_tp: Ranks of each prefill instance.
        decode_tp: Ranks of each decode instance.
        proxied: Whether others dial proxies: before gRPC and the tcp pipe; other pipes have ports of their own.
        connection: Descriptors and threads that one of its KV pipes' connections takes.
        router: More flags of both routers.
        secured: Whether it has a token, API keys and TLS everywhere.
    """

    name: str
    pipes: str
    prefill_tp: int = 1
    decode_tp: int = 1
    proxied: bool = True
    connection: tuple[int, int] = (1, 1)
    router: tuple[str, ...] = ()
    secured: bool = False

    def possible(self) -> Shape:
        """Return it, or one that runs here in its place."""
        if self.pipes == "nixl" and nixl_obstacle():
            return dataclasses.replace(self, name="tcp, in place of nixl", pipes="tcp")
        return self


SHAPES = (
    Shape("tcp", "tcp"),
    Shape("shm", "shm,tcp"),
    Shape("gloo", "gloo", proxied=False, connection=(6, 3)),
    Shape("tcp, decode tp 2", "tcp", decode_tp=2),
    Shape("nixl", "nixl", proxied=False),
    Shape("tcp, prefill first", "tcp", router=("--order", "prefill_first")),
    Shape("shm, tp 2", "shm,tcp", prefill_tp=2, decode_tp=2),
    Shape("tcp, cost_ms", "tcp", router=("--policy", "cost_ms")),
    Shape("tls, keys", "tls", secured=True),
    Shape("shm, keys, prefill first", "shm,tls", secured=True, router=("--order", "prefill_first")),
)


class Clocks:
    """Sets the wall clocks of processes that preload ``clock.c``.

    With ``BATON_CHAOS_CLOCK_ALL`` in the environment their monotonic clocks, too: what then goes wrong would go wrong
    wherever a lease or a deadline went by the wall clock.
    """

    def __init__(self, folder: Path) -> None:
        self.library, table = folder / "clock.so", folder / "clocks"
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", self.library, Path(__file__).with_name("clock.c"), "-ldl"]
        subprocess.run(command, check=True)
        table.write_bytes(bytes(16 * _CLOCK_SLOTS))
        with table.open("r+b") as file:
            self._slots = mmap.mmap(file.fileno(), 0)
        self.env = {"LD_PRELOAD": str(self.library), "BATON_CHAOS_CLOCK": str(table)}

    def set(self, pid: int, seconds: float) -> None:
        """Put a process's clock so far before the machine's (after it, if negative)."""
        struct.pack_into("q", self._slots, 16 * (pid % _CLOCK_SLOTS), int(seconds * 1e9))

    def reads(self, pid: int) -> int:
        """Return how often a process read a clock that was set."""
        return int(struct.unpack_from("q", self._slots, 16 * (pid % _CLOCK_SLOTS) + 8)[0])


@dataclass(frozen=True, kw_only=True)
class _Plan(DeploymentPlan):
    second: ProcessSpec

    @property
    def groups(self) -> list[tuple[ProcessSpec, ...]]:
        first = () if self.kvstore is None else (self.kvstore,)
        return [first, (self.router, self.second), self.workers]


class Deployment:
    """One, with everything that faults need.

    Args:
        shape: Which.
        folder: An empty one, for the store's disk tier and logs.
        clocks: Of its processes.
        starter: Forks its processes.
        credentials: For shapes that have some.

    Attributes:
        private: Whether ``folder`` is a small file system of its own, and /dev/shm too, so that both may be filled.
        supervisor: Restarts what dies.
        redis: Where the routers share their books, and a tier of the store.
        proxies: By what they stand before: ``prefill-0 grpc``, ``prefill-0 kv``, ..., ``redis``.
        lines: The last log lines.
        told: What they complained of, of what is filled; how often.
        disk: The store's folder on disk.
    """

    def __init__(
        self,
        shape: Shape,
        folder: Path,
        clocks: Clocks,
        starter: WarmStarter,
        credentials: Credentials,
        *,
        private: bool = False,
    ) -> None:
        self.shape, self.clocks, self.private = shape, clocks, private
        self.credentials = credentials if shape.secured else None
        self.disk = folder / "kv"
        self.disk.mkdir()
        self.redis = RedisServer()
        self.proxies: dict[str, TcpProxy] = {}
        self.lines: deque[str] = deque(maxlen=20000)
        self.told: Counter[str] = Counter()
        self._counted: dict[str, tuple[int, Counter[str]]] = {}
        self._latest: dict[str, tuple[int, Counter[str]]] = {}
        plan = self._plan()
        token, tls = (None, None) if self.credentials is None else (self.credentials.token, self.credentials.tls)
        self.supervisor = Supervisor(plan, self._emit, backoff_s=(0.05, 0.5), grace_s=20.0, token=token, tls=tls)
        supervisor.HEALTH_INTERVAL_S = 0.25  # each look costs more than it would gain
        self.supervisor.spawn = starter.spawn
        self.routers = (plan.router, plan.second)
        self.first_idle: dict[str, tuple[int, int, int]] = {}
        self._http = httpx.AsyncClient(timeout=20, verify=self.verify)
        key = None if self.credentials is None else self.credentials.keys["admin"]
        self._lookers = [
            AsyncClient(spec.health_address, retries=0, timeout=10, token=key, tls=tls) for spec in self.routers
        ]
        self._stack = contextlib.AsyncExitStack()

    def _emit(self, name: str, line: str) -> None:
        self.lines.append(f"{time.monotonic():.3f} {name} | {line}")
        for what in _COMPLAINTS.findall(line):
            self.told[f"told {what}"] += 1

    def _plan(self) -> _Plan:
        shape, redis = self.shape, self.redis
        self.proxies[REDIS] = TcpProxy(redis.port, host=PEERS, port=redis.port)
        url = f"redis://{PEERS}:{redis.port}/0"
        worker: tuple[str, ...] = (
            "--model", str(MODEL), "--dtype", "float32", "--kv-blocks", str(KV_BLOCKS), "--prefill-chunk", "128",
            "--max-num-seqs", "16", "--prefill-stall-s", "4", "--remote-prefill-threshold", "16", "--lease-s", "15",
        )  # fmt: skip
        router = (*shape.router, "--redis", url, "--replicas", "2", "--replica-forget-s", "20",
                  "--probe-interval-s", "1", "--probe-timeout-s", "3", "--no-instance-wait-s", "15",
                  "--retry-budget", "1", "--max-retries", "6")  # fmt: skip
        if self.credentials is not None:
            worker += self.credentials.service_flags
            router += self.credentials.router_flags
        base = make_plan(
            ratio=Ratio(2, 2),
            pipes=shape.pipes,
            kvstore=True,
            extra=ExtraArgs(
                worker=worker,
                prefill=("--tp", str(shape.prefill_tp)),
                decode=("--tp", str(shape.decode_tp)),
                router=router,
            ),
        )
        assert base.kvstore is not None
        http, grpc, *kv_ports = free_ports(2 + 1 + len(base.workers))
        second_args = (*base.router.args, "--port", str(http), "--grpc-port", str(grpc), "--replica-name", "two")
        store_port = base.kvstore.health_address.rsplit(":", 1)[1]
        host = PEERS if shape.proxied else "127.0.0.1"
        stores = f"{host}:{store_port}"
        routers = f"{base.grpc_address},127.0.0.1:{grpc}"
        workers = []
        for spec, kv_port in zip(base.workers, kv_ports[1:], strict=True):
            port = self._proxied(spec, kv_port)
            more = ("--kv-port", str(kv_port), "--advertise", f"{host}:{port}", "--routers", routers)
            workers.append(dataclasses.replace(spec, args=(*spec.args, *more, "--kvstore", stores)))
        self._proxied(base.kvstore, kv_ports[0])
        memory = ("--capacity-bytes", str(12 << 20), "--default-lease-s", "3", "--max-lease-s", "8")
        disk = ("--disk-path", str(self.disk), "--disk-bytes", str(_DISK_BYTES), "--disk-segment-bytes", str(4 << 20))
        remote = ("--redis-url", url, "--redis-bytes", str(64 << 20))
        where = ("--kv-port", str(kv_ports[0]), "--advertise-host", host)
        own = () if self.credentials is None else self.credentials.service_flags
        store_args = (*where, *memory, *disk, *remote, *own)
        return _Plan(
            kvstore=dataclasses.replace(base.kvstore, args=(*base.kvstore.args, *store_args)),
            router=dataclasses.replace(
                base.router, args=(*base.router.args, "--replica-name", "one", "--kvstore", stores)
            ),
            workers=tuple(workers),
            http_address=base.http_address,
            grpc_address=base.grpc_address,
            second=ProcessSpec(
                name="router-2",
                module=base.router.module,
                args=(*second_args, "--kvstore", stores),
                health_address=f"127.0.0.1:{grpc}",
                role="router",
                listens=(("http", f"127.0.0.1:{http}"), ("grpc", f"127.0.0.1:{grpc}"),
                         ("metrics", f"127.0.0.1:{http}/metrics")),
            ),
        )  # fmt: skip

    def _proxied(self, spec: ProcessSpec, kv_port: int) -> int:
        port = int(spec.health_address.rsplit(":", 1)[1])
        for kind, number in (("grpc", port), ("kv", kv_port)) if self.shape.proxied else ():
            self.proxies[f"{spec.name} {kind}"] = TcpProxy(number, host=PEERS, port=number)
        return port

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.redis)
            for proxy in self.proxies.values():
                await proxy.start()
                stack.push_async_callback(proxy.stop)
            stack.push_async_callback(self._http.aclose)
            for looker in self._lookers:
                await stack.enter_async_context(looker)
            await stack.enter_async_context(self.supervisor)
            self._stack = stack.pop_all()
        return self

    @contextlib.asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Run it; its last log lines are printed where it does not start or breaks off."""
        try:
            async with self:
                yield
        except BaseException:
            print("\n".join(list(self.lines)[-60:]), flush=True)  # noqa: T201
            raise

    async def __aexit__(self, *error: object) -> None:
        for name in self.names:  # a stopped process would not end
            with contextlib.suppress(BatonError, ProcessLookupError):
                os.kill(self.pid(name), signal.SIGCONT)
        await self._stack.aclose()

    @property
    def names(self) -> list[str]:
        """Its processes, without Redis."""
        return [spec.name for group in self.supervisor.plan.groups for spec in group]

    def role(self, name: str) -> str:
        """Return what a process is."""
        return self.supervisor.processes[name].spec.role

    def num_ranks(self, name: str) -> int:
        """Return how many processes a name stands for."""
        return {"prefill": self.shape.prefill_tp, "decode": self.shape.decode_tp}.get(self.role(name), 1)

    def pid(self, name: str) -> int:
        """Return the id of the process that has a name now."""
        return self.supervisor.processes[name].pid

    @property
    def verify(self) -> ssl.SSLContext | bool:
        """What HTTP clients check certificates by."""
        return False if self.credentials is None else self.credentials.https

    def client(self, router: int, user: str, timeout_s: float) -> AsyncClient:
        """Return a client of a router."""
        address, own = self.routers[router].health_address, self.credentials
        token, tls = (None, None) if own is None else (own.keys[user], own.tls)
        return AsyncClient(address, timeout=timeout_s, retries=0, token=token, tls=tls)

    def http(self, router: int, user: str) -> tuple[str, dict[str, str]]:
        """Return a router's URL, and the headers of a user."""
        address = dict(self.routers[router].listens)["http"]
        if self.credentials is None:
            return f"http://{address}", {}
        return f"https://{address}", {"authorization": f"Bearer {self.credentials.keys[user]}"}

    async def metrics(self, name: str) -> dict[str, float]:
        """Return a process's metrics: name with labels to value."""
        address = dict(self.supervisor.processes[name].spec.listens)["metrics"]
        own = self.credentials if self.role(name) == "router" else None
        scheme, headers = ("http", {}) if own is None else ("https", own.admin_headers)
        answer = await self._http.get(f"{scheme}://{address}", headers=headers)
        text = answer.raise_for_status().text
        return {
            key: float(value) for key, value in re.findall(r"^([a-z][^ #]*(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)
        }

    async def settle(self) -> str:
        """Wait until everybody is back and idle; returns what is not, empty if all is well."""
        deadline, pause_s = time.monotonic() + SETTLED_S, 0.05
        while True:
            try:
                left = await self._unsettled()
            except (BatonError, httpx.HTTPError) as error:
                left = f"{type(error).__name__}: {error}"
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.5)

    async def _unsettled(self) -> str:
        """Say what is in flight, held or missing."""
        workers = {spec.name for spec in self.supervisor.plan.workers}
        for name in self.names:
            if self.supervisor.processes[name].returncode is not None:
                return f"{name} is dead"
        for spec, looker in zip(self.routers, self._lookers, strict=True):
            found = await looker.list_instances()
            healthy = {item.instance_id for item in found if item.healthy and item.load.blocks_total}
            if healthy != workers:
                return f"{spec.name} sees {sorted(healthy)}"
            for item in found:
                if item.in_flight:
                    return f"{spec.name} has {item.in_flight} in flight on {item.instance_id}"
        for name in self.names:
            found_here = await self.metrics(name)
            for key, value in found_here.items():
                if value and key.startswith(IDLE):
                    return f"{name}: {key} is {value:g}"
            counts: Counter[str] = Counter()
            for key, value in found_here.items():
                counts[COUNTED.get(key.partition("{")[0], "")] += int(value)
            self._latest[name] = self.pid(name), counts
        return ""

    def counted(self) -> Counter[str]:
        """Return what the processes have counted, of ``COUNTED``, and complained of since the last call."""
        found, self.told = self.told, Counter()
        for name, (pid, counts) in self._latest.items():
            before = self._counted.get(name, (0, Counter()))
            found += counts - before[1] if before[0] == pid else counts
        self._counted = dict(self._latest)
        del found[""]
        return found

    def resources(self) -> dict[str, tuple[int, int, int]]:
        """Return descriptors, threads and resident bytes of each process, its ranks included."""
        found = {}
        for name in self.names:
            whole = psutil.Process(self.pid(name))
            parts = [whole, *whole.children(recursive=True)]
            sums = [(part.num_fds(), part.num_threads(), part.memory_info().rss) for part in parts]
            found[name] = (sum(x[0] for x in sums), sum(x[1] for x in sums), sum(x[2] for x in sums))
        return found

    def leaks(self) -> str:
        """Say which process has more than what had its name after the first work, which the first call notes."""
        descriptors, threads = self.shape.connection
        slack_of_all = (descriptors * SLACK_DESCRIPTORS, threads * SLACK_THREADS, SLACK_BYTES)
        for name, now in self.resources().items():
            first = self.first_idle.setdefault(name, now)
            limits = zip(now, first, slack_of_all, strict=True)
            if any(value > before + slack for value, before, slack in limits):
                return f"{name}: descriptors, threads and bytes {now}, first {first}"
        return ""


COUNTED = {
    "baton_worker_failed_remote_prefills_total": "failed prefills",
    "baton_store_save_failures_total": "failed saves",
    "baton_store_load_failures_total": "failed loads",
    "baton_store_loaded_tokens_total": "tokens from the store",
    "baton_store_times_left_alone_total": "store left alone",
    "baton_router_retries_total": "retries",
    "baton_router_migrations_total": "migrations",
    "baton_router_breaker_opened_total": "breakers opened",
    "baton_router_redis_losses_total": "Redis lost",
    "baton_router_index_sequence_gaps_total": "event gaps",
    "baton_kvstore_promotions_total": "blocks from tiers behind",
    "baton_kvstore_demotions_total": "blocks to tiers behind",
    "baton_kvstore_handed_over_total": "blocks from disk to Redis",
    "baton_kvstore_tier_errors_total": "tier errors",
    "baton_kvstore_tier_damaged_total": "damaged blocks",
    "baton_kvstore_disk_write_errors_total": "disk errors",
    "baton_engine_num_preemptions_total": "preemptions",
}
"""Counters that show that faults bite, and what the log calls them."""
_COMPLAINTS = re.compile(
    "[Cc]an(?:not|.t) allocate memory|MemoryError|bad_alloc|start new thread|"
    "Too many open files|No space left|ended with"
)
IDLE = (
    "baton_engine_num_running",
    "baton_engine_num_waiting",
    "baton_engine_num_loading",
    "baton_engine_blocks_active",
    "baton_worker_leases",
    "baton_kvstore_leases",
    "baton_router_queue_requests",
    "baton_router_waiting_for_room",
    "baton_router_instance_in_flight",
    "baton_router_instance_shared_in_flight",
    "baton_router_instance_work_tokens",
    "baton_router_direct_open",
)
"""Metrics that are 0 when nobody asks for anything."""
