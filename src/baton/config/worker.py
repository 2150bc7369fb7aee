"""What a prefill or a decode service can be told, beside its engine."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.flags import option
from baton.config.pipes import AUTO, PIPES_HELP, check_pipes
from baton.errors import ConfigError


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration of one prefill or decode service."""

    host: str = option("127.0.0.1", "address to listen on; off loopback it needs --token-file")
    port: int = option(0, "gRPC port; 0 takes a free one")
    kv_port: int = option(0, "port of the tcp pipe; 0 takes a free one")
    metrics_port: int = option(0, "port of /metrics; 0: none")
    instance_id: str = option("", "name of this instance; default: role, host and port")
    advertise: str = option("", "host:port under which others reach this instance; default: where it listens")
    routers: tuple[str, ...] = option((), "gRPC addresses of routers to register with")
    redis: str = option("", "URL of a Redis to register in, for routers with --discover redis")
    redis_prefix: str = option("baton", "put before every key in Redis")
    pipes: tuple[str, ...] = option((AUTO,), PIPES_HELP)
    layerwise: bool = option(True, "prefill: offer KV layer by layer while it is computed")
    kv_streams: int = option(4, "TCP connections that one big fetch is split over")
    kv_checksums: bool = option(True, "compare checksums of KV that came over a network")
    fetch_threads: int = option(16, "fetches of KV at once")
    token_file: str = option("", "file with the token that services show each other")
    ticket_key_file: str = option(
        "", "decode: file with the key of placement tickets; a client that comes without a router must show one"
    )
    kvstore: str = option("", "gRPC address of a KV store to load from and save to; default: none")
    kv_connectors: tuple[str, ...] = option((), "KV connectors of installed packages, asked before the built-in ones")
    kv_connector_options: tuple[str, ...] = option((), "their options, as connector.key=value")
    remote_prefill_threshold: int = option(64, "missing prompt tokens from which decode asks a prefill instance")
    prefill_stall_s: float = option(30.0, "seconds without progress after which a prefill instance is given up")
    lease_s: float = option(120.0, "seconds that finished blocks are kept for a reader that does not come")
    max_leases: int = option(256, "Prefill calls that may be open at once; more are refused with 429")
    load_interval_ms: int = option(100, "shortest time between two load reports")
    kv_events: bool = option(True, "tell routers what the prefix cache holds; else they go by their own decisions")
    drain_timeout_s: float = option(30.0, "seconds that running requests get at shutdown")
    log_level: str = option("info", "log level", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        for name in ("port", "kv_port", "metrics_port"):
            if not 0 <= getattr(self, name) < 65536:
                raise ConfigError(f"{name} must be between 0 and 65535, got {getattr(self, name)}", field=name)
        for name in ("prefill_stall_s", "lease_s", "max_leases", "load_interval_ms", "kv_streams", "fetch_threads"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}", field=name)
        check_pipes(self.pipes)
        for name, addresses in (
            ("routers", self.routers),
            ("kvstore", (self.kvstore,)),
            ("advertise", (self.advertise,)),
        ):
            for address in filter(None, addresses):
                host, _, port = address.rpartition(":")
                if not host or not port.isdigit():
                    raise ConfigError(f"{name}: {address!r} is not host:port", field=name)
        if self.host in {"0.0.0.0", "::", "[::]"} and not self.advertise:
            raise ConfigError(f"listening on {self.host} needs --advertise: others cannot dial it", field="advertise")
