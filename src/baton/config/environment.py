"""Variables that are not flags: OpenTelemetry's and Kubernetes' are read; NCCL's, UCX's and NIXL's are set."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

import psutil

INFINIBAND = Path("/sys/class/infiniband")


def traces_endpoint() -> str:
    """Return the collector that OpenTelemetry's variables name; empty: none, or traces are switched off."""
    source = os.environ
    if source.get("OTEL_SDK_DISABLED", "").lower() == "true" or source.get("OTEL_TRACES_EXPORTER", "") == "none":
        return ""
    return source.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or source.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")


def in_cluster_api() -> str:
    """Return the URL of the API server of this pod's cluster; empty: this process does not run in a pod."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""


def set_nccl_environment() -> None:
    """Have NCCL listen on loopback only, unless set otherwise: ranks share a host, and NCCL authenticates no peer."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def set_ucx_environment(host: str, *, infiniband: Path = INFINIBAND) -> None:
    """Set what UCX (NIXL's engine) needs to listen on ``host`` only, and fast sockets; set variables are kept.

    Call it before a process's first NIXL agent is made. The settings, and why:

    - ``UCX_NET_DEVICES``: the interface that owns ``host``, and the InfiniBand ports; else UCX listens on all of them.
      Not set for a wildcard address, which asks for all.
    - ``UCX_MODULES=^ib`` on a machine without InfiniBand: that module crashes there when the process ends.
    - ``UCX_MM_ERROR_HANDLING=y``: admits shared memory although peers may die.
    - ``UCX_TCP_TX_SEG_SIZE``, ``UCX_TCP_RX_SEG_SIZE``: 256 KiB make sockets eight times faster.

    Args:
        host: Address that pipes listen on.
        infiniband: Folder in which the kernel lists InfiniBand devices.
    """
    ports = infiniband_ports(infiniband)
    wanted = {
        "UCX_MM_ERROR_HANDLING": "y",
        "UCX_TCP_TX_SEG_SIZE": "256K",
        "UCX_TCP_RX_SEG_SIZE": "256K",
    }
    if not ports:
        wanted["UCX_MODULES"] = "^ib"
    interface = interface_of(host)
    if interface:
        wanted["UCX_NET_DEVICES"] = ",".join((interface, *ports))
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def set_nixl_log_level() -> None:
    """Silence the logs of NIXL and UCX, unless a level is set; call it before NIXL is loaded.

    Failures are raised as errors, and logged by the caller.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")


def infiniband_ports(folder: Path = INFINIBAND) -> list[str]:
    """Return this machine's InfiniBand (or RoCE) ports as UCX names them: ``mlx5_0:1``."""
    return sorted(f"{port.parent.parent.name}:{port.name}" for port in folder.glob("*/ports/*"))


def interface_of(host: str) -> str | None:
    """Return the network interface that owns an address; ``None``: a wildcard, or no address of this machine."""
    try:
        addresses = {str(item[4][0]) for item in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return None
    wanted = {ipaddress.ip_address(address.split("%")[0]) for address in addresses}
    for name, owned in psutil.net_if_addrs().items():
        for item in owned:
            if item.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            own = ipaddress.ip_address(item.address.split("%")[0])
            # Any address of 127.0.0.0/8 is the loopback interface's.
            if own in wanted or (own.is_loopback and any(address.is_loopback for address in wanted)):
                return name
    return None
