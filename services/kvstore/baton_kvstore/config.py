"""What a KV store can be told."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.access import CLEAR_KV_HELP, TLS_CA_HELP, TLS_CERT_HELP, TLS_KEY_HELP, TLS_NAME_HELP
from baton.config.flags import option
from baton.config.pipes import AUTO, PIPES_HELP, check_pipes
from baton.errors import ConfigError
from baton_kvstore.tiers.config import TierConfig


@dataclass(frozen=True)
class KVStoreConfig(TierConfig):
    """Configuration of one KV store process. Times in seconds, sizes in bytes."""

    host: str = option("127.0.0.1", "address to listen on; off loopback only with --token-file or --tls-cert")
    port: int = option(0, "gRPC port; 0: a free one")
    advertise_host: str = option("", "host under which instances reach this store's blocks; default: --host")
    instance_id: str = option("", "name of this store; default: kvstore-<random>")
    register_redis: str = option(
        "", "URL of a Redis to register in, as one of several nodes, for instances with --kvstore discover"
    )
    register_prefix: str = option("baton", "put before every key there; instances call it --redis-prefix")
    tenant_bytes: int = option(
        0, "memory that the blocks of a tenant may take whose API key has no kv_bytes; 0: any amount"
    )
    tenant_disk_bytes: int = option(0, "the same on disk, for a tenant whose API key has no kv_disk_bytes")
    pipes: tuple[str, ...] = option((AUTO,), PIPES_HELP)
    token_file: str = option("", "file with the shared token that callers must show")
    tls_cert: str = option("", TLS_CERT_HELP)
    tls_key: str = option("", TLS_KEY_HELP)
    tls_ca: str = option("", TLS_CA_HELP)
    tls_name: str = option("", TLS_NAME_HELP)
    clear_kv: bool = option(False, CLEAR_KV_HELP)
    metrics_port: int = option(0, "port of /metrics; 0: none")
    max_blocks_per_call: int = option(4096, "hashes that one call may name")
    max_leases: int = option(4096, "leases that may live at once")
    max_fingerprints: int = option(16, "kinds of KV (model, rank, layout) held at once")
    default_lease_s: float = option(10.0, "lease of a Get that asks for none")
    max_lease_s: float = option(60.0, "longest lease that a Get is given")
    pull_workers: int = option(2, "Puts whose blocks are fetched at the same time")
    max_pending_puts: int = option(64, "Puts running or waiting; more are refused")
    pull_timeout_s: float = option(30.0, "longest time that one Put may take")
    drain_timeout_s: float = option(5.0, "time that running calls have at shutdown")
    log_level: str = option("info", "log level", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        self.check_tiers()
        for name in (
            "max_blocks_per_call",
            "max_leases",
            "max_fingerprints",
            "pull_workers",
            "max_pending_puts",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}", field=name)
        for name in ("tenant_bytes", "tenant_disk_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}", field=name)
        for name in ("default_lease_s", "max_lease_s", "pull_timeout_s"):
            if not 0.0 < getattr(self, name) <= 3600.0:
                raise ConfigError(f"{name} must be above 0 and at most 3600, got {getattr(self, name)}", field=name)
        if not 0.0 <= self.drain_timeout_s <= 3600.0:
            raise ConfigError(
                f"drain_timeout_s must be in [0, 3600], got {self.drain_timeout_s}", field="drain_timeout_s"
            )
        if self.default_lease_s > self.max_lease_s:
            raise ConfigError("default_lease_s must be at most max_lease_s", field="default_lease_s")
        check_pipes(self.pipes, without=frozenset({"memory"}))
        for name in ("port", "metrics_port"):
            if not 0 <= getattr(self, name) < 65536:
                raise ConfigError(f"{name} must be between 0 and 65535, got {getattr(self, name)}", field=name)
