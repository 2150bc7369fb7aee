"""Flags of ``baton up`` that say where the deployment listens, and who may call it."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.flags import option, require, require_ports
from baton.errors import ConfigError

LOOPBACK = "127.0.0.1"
_LAST_METRICS_PORT = 65_000
"""Largest ``metrics_port``: the ports of the other processes follow it."""


@dataclass(frozen=True)
class ListenConfig:
    """Addresses and ports of a deployment on this machine."""

    host: str = option(
        LOOPBACK,
        "address that the router listens on, 0.0.0.0: all of this machine's; off loopback it wants --api-keys or "
        "--open-http. Instances and KV store stay on loopback",
    )
    port: int = option(8000, "HTTP port of the router; 0: a free one")
    grpc_port: int = option(8001, "gRPC port of the router; 0: a free one")
    instance_host: str = option(
        LOOPBACK, "address of this machine that instances and KV store listen on, for instances on other machines"
    )
    metrics_port: int = option(
        0,
        "port of the router's /metrics, without API keys; the next ones are the KV store's, the autoscaler's and the "
        "instances', in the order of the start; 0: free ones, and the router's on --port",
    )

    def __post_init__(self) -> None:
        require_ports(self, "port", "grpc_port", "metrics_port")
        require(self, ["metrics_port"], lambda port: port <= _LAST_METRICS_PORT, f"be at most {_LAST_METRICS_PORT}")
        if not self.host or not self.instance_host:
            raise ConfigError("--host and --instance-host must not be empty", field="host")
        if self.instance_host in {"0.0.0.0", "::", "[::]"}:
            message = f"--instance-host must be an address that others can dial, got {self.instance_host}"
            raise ConfigError(message, field="instance_host")
