"""Which processes make up a deployment on this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from baton.cli.process import ProcessSpec
from baton.config.pipes import AUTO
from baton.errors import ConfigError
from baton.rpc.ports import free_ports

HOST = "127.0.0.1"
MAX_INSTANCES = 64


@dataclass(frozen=True, slots=True)
class Ratio:
    """x prefill and y decode instances, written ``xPyD``."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> Ratio:
        """Read ``2P3D``.

        Raises:
            ConfigError: Not of that form, or no decode instance.
        """
        match = re.fullmatch(r"(\d+)[pP](\d+)[dD]", text)
        if match is None:
            raise ConfigError(f"--ratio must look like 2P3D, got {text!r}", field="ratio")
        ratio = cls(int(match[1]), int(match[2]))
        if ratio.decode < 1:
            raise ConfigError(f"--ratio {text} has no decode instance", field="ratio")
        if ratio.prefill + ratio.decode > MAX_INSTANCES:
            raise ConfigError(f"--ratio {text} has more than {MAX_INSTANCES} instances", field="ratio")
        return ratio

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D"


@dataclass(frozen=True, slots=True)
class ExtraArgs:
    """More command line for some of the processes."""

    worker: tuple[str, ...] = ()
    """For every instance."""
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    router: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeploymentPlan:
    """The processes in the order of their start: every group is ready before the next one begins."""

    kvstore: ProcessSpec | None
    router: ProcessSpec
    workers: tuple[ProcessSpec, ...]
    http_address: str
    grpc_address: str

    @property
    def groups(self) -> list[tuple[ProcessSpec, ...]]:
        """Groups in the order of start."""
        first = () if self.kvstore is None else (self.kvstore,)
        return [group for group in (first, (self.router,), self.workers) if group]


def make_plan(
    *,
    ratio: Ratio,
    port: int,
    grpc_port: int = 0,
    pipes: str = AUTO,
    kvstore: bool = False,
    load_from_store: bool = False,
    token_file: str = "",
    extra: ExtraArgs | None = None,
) -> DeploymentPlan:
    """Lay out a deployment on loopback.

    Args:
        ratio: How many instances.
        port: HTTP port of the router; 0 takes a free one.
        grpc_port: gRPC port of the router; 0 takes a free one.
        pipes: Comma-separated kinds, in order of preference.
        kvstore: Whether a KV store runs too.
        load_from_store: Whether instances load from and save to the store.
        token_file: File with the token that the services show each other; empty: none.
        extra: More flags.

    Raises:
        ConfigError: What engines need is not installed.
    """
    if find_spec("torch") is None:
        raise ConfigError("prefill and decode instances need torch: pip install 'baton-serve[engine]'", field="ratio")
    more = extra or ExtraArgs()
    num_workers = ratio.prefill + ratio.decode
    free = iter(free_ports(2 * num_workers + 4))
    http = f"{HOST}:{port or next(free)}"
    grpc = f"{HOST}:{grpc_port or next(free)}"
    token = ("--token-file", token_file) if token_file else ()
    store = _kvstore_spec(next(free), next(free), ["--pipes", pipes, *token]) if kvstore else None
    shared = ["--routers", grpc, "--pipes", pipes, *token, *more.worker]
    knows: list[str] = []
    if store is not None and load_from_store:
        shared += ["--kvstore", store.health_address]
        knows = ["--kvstore", store.health_address]
    workers = []
    for role, count, own in (("prefill", ratio.prefill, more.prefill), ("decode", ratio.decode, more.decode)):
        for index in range(count):
            workers.append(_worker_spec(role, index, next(free), next(free), [*shared, *own]))
    host, http_port = http.rsplit(":", 1)
    router = ProcessSpec(
        name="router",
        module="baton_router.main",
        args=("--host", host, "--port", http_port, "--grpc-port", grpc.rsplit(":", 1)[1], *token, *knows, *more.router),
        health_address=grpc,
        role="router",
        listens=(("http", http), ("grpc", grpc), ("metrics", f"{http}/metrics")),
    )
    return DeploymentPlan(store, router, tuple(workers), http, grpc)


def _worker_spec(role: str, index: int, port: int, metrics_port: int, args: Sequence[str]) -> ProcessSpec:
    address, name = f"{HOST}:{port}", f"{role}-{index}"
    own = ("--host", HOST, "--port", str(port), "--metrics-port", str(metrics_port), "--instance-id", name)
    listens = (("grpc", address), ("metrics", f"{HOST}:{metrics_port}/metrics"))
    return ProcessSpec(name, f"baton_{role}.main", (*own, *args), address, role, listens)


def _kvstore_spec(port: int, metrics_port: int, args: Sequence[str]) -> ProcessSpec:
    address = f"{HOST}:{port}"
    own = ("--host", HOST, "--port", str(port), "--metrics-port", str(metrics_port), "--instance-id", "kvstore")
    listens = (("grpc", address), ("metrics", f"{HOST}:{metrics_port}/metrics"))
    return ProcessSpec("kvstore", "baton_kvstore.main", (*own, *args), address, "kvstore", listens)
