"""Plans the processes of a deployment on this machine: their addresses and flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from baton.cli.supervisor import DeploymentPlan, ProcessSpec
from baton.config.cluster_file import Pool
from baton.config.flags import ENV_PREFIX
from baton.config.secrets import flags_with_passwords
from baton.errors import ConfigError
from baton.rpc.server import free_ports

HOST = "127.0.0.1"
MAX_INSTANCES = 64

_URLS = frozenset({"--redis", "--kvstore"})
"""Flags whose values may contain passwords."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """x prefill and y decode instances, written ``xPyD``."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> Ratio:
        """Parse a ratio such as ``2P3D``.

        Raises:
            ConfigError: The text is malformed, or has no decode instance or too many instances.
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
    """Additional flags of some processes."""

    worker: tuple[str, ...] = ()
    """For every instance."""
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    router: tuple[str, ...] = ()
    config: str = ""
    """Configuration file of all processes."""
    pools: tuple[Pool, ...] = ()
    """Instances beside those of the ratio."""


def make_plan(
    *,
    ratio: Ratio,
    port: int,
    grpc_port: int = 0,
    pipes: str = "",
    kvstore: bool = False,
    access: Sequence[str] = (),
    extra: ExtraArgs | None = None,
) -> DeploymentPlan:
    """Plan a deployment on loopback.

    Args:
        ratio: Number of prefill and decode instances.
        port: HTTP port of the router; 0 takes a free one.
        grpc_port: gRPC port of the router; 0 takes a free one.
        pipes: Comma-separated kinds of pipe, in order of preference; empty: the services' default.
        kvstore: Whether a KV store runs too, used by all instances.
        access: Flags for token and certificates of all services.
        extra: Additional flags.

    Raises:
        ConfigError: torch is not installed, or there are too many instances.
    """
    if find_spec("torch") is None:
        raise ConfigError("prefill and decode instances need torch: pip install 'baton-serve[engine]'", field="ratio")
    more = extra or ExtraArgs()
    pools = (Pool("prefill", "prefill", ratio.prefill), Pool("decode", "decode", ratio.decode), *more.pools)
    num_workers = sum(pool.replicas or 0 for pool in pools)
    if num_workers > MAX_INSTANCES:
        raise ConfigError(f"{num_workers} instances are more than {MAX_INSTANCES}", field="ratio")
    free = iter(free_ports(2 * num_workers + 4))
    http = f"{HOST}:{port or next(free)}"
    grpc = f"{HOST}:{grpc_port or next(free)}"
    config = ("--config", more.config) if more.config else ()
    both = (*config, *(("--pipes", pipes) if pipes else ()), *access)
    store = _spec("kvstore", "kvstore", (next(free), next(free)), both) if kvstore else None
    knows = () if store is None else ("--kvstore", store.health_address)
    shared = ("--routers", grpc, *both, *knows, *more.worker)
    own = {"prefill": more.prefill, "decode": more.decode}
    workers = []
    for pool in pools:
        args = [*shared, *own[pool.role]]
        if config and pool.name != pool.role:
            args = [*shared, "--pool", pool.name, *own[pool.role]]
        for index in range(pool.replicas or 0):
            workers.append(_spec(pool.role, f"{pool.name}-{index}", (next(free), next(free)), args))

    def one_more(role: str, name: str, instead: ProcessSpec | None) -> ProcessSpec:
        port, metrics_port = free_ports(2) if instead is None else _ports(instead)
        return _spec(role, name, (port, metrics_port), [*shared, *own[role]])

    host, http_port = http.rsplit(":", 1)
    words, env = _without_passwords([*config, *access, *knows, *more.router])
    router = ProcessSpec(
        name="router",
        module="baton_router.main",
        args=("--host", host, "--port", http_port, "--grpc-port", grpc.rsplit(":", 1)[1], *words),
        env=env,
        health_address=grpc,
        role="router",
        listens=(("http", http), ("grpc", grpc), ("metrics", f"{http}/metrics")),
    )
    secure = "--tls-cert" in access and "--no-http-tls" not in more.router
    scheme = "https" if secure else "http"
    return DeploymentPlan(store, router, tuple(workers), http, grpc, scheme, worker=one_more)


def _spec(role: str, name: str, ports: tuple[int, int], args: Sequence[str]) -> ProcessSpec:
    """Return the specification of a service with a gRPC port and a metrics port."""
    port, metrics_port = ports
    own = ("--host", HOST, "--port", str(port), "--metrics-port", str(metrics_port), "--instance-id", name)
    address = f"{HOST}:{port}"
    listens = (("grpc", address), ("metrics", f"{HOST}:{metrics_port}/metrics"))
    more, env = _without_passwords(args)
    return ProcessSpec(name, f"baton_{role}.main", (*own, *more), address, role, listens, env)


def _ports(spec: ProcessSpec) -> tuple[int, int]:
    port, metrics_port = (address.partition("/")[0].rpartition(":")[2] for _, address in spec.listens)
    return int(port), int(metrics_port)


def _without_passwords(args: Sequence[str]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Move URLs with passwords from a command line, which all users of the host can read, to the environment.

    Returns:
        The remaining words, and the variables with the URLs.
    """
    words = list(args)
    env: dict[str, str] = {}
    hidden = set(flags_with_passwords(args)) & _URLS
    for at in reversed(range(len(words))):
        flag, equals, value = words[at].partition("=")
        if flag in hidden and (equals or words[at + 1 :]):
            name = ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper()
            env.setdefault(name, value if equals else words[at + 1])
            del words[at : at + (1 if equals else 2)]
    return tuple(words), tuple(env.items())
