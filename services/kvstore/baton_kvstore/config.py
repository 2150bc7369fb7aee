"""What a KV store can be told."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.flags import option
from baton.config.pipes import AUTO, PIPES_HELP, check_pipes
from baton.errors import ConfigError

_MIN_DISK_BYTES = 1 << 20


@dataclass(frozen=True)
class KVStoreConfig:
    """Configuration of one KV store process. Times in seconds, sizes in bytes."""

    host: str = option("127.0.0.1", "address to listen on; off loopback only with --token-file")
    port: int = option(0, "gRPC port; 0: a free one")
    advertise_host: str = option("", "host under which instances reach this store's blocks; default: --host")
    instance_id: str = option("", "name of this store; default: kvstore-<random>")
    capacity_bytes: int = option(1 << 30, "memory for blocks, all models together")
    disk_path: str = option("", "directory, of its own, for blocks that memory has no room for; default: memory only")
    disk_bytes: int = option(16 << 30, "size of the files in --disk-path, all together")
    disk_write: str = option("evicted", "blocks that go to disk", choices=("evicted", "all"))
    disk_sync_s: float = option(1.0, "longest time after which a block written to disk survives a loss of power")
    disk_checkpoint_s: float = option(30.0, "time between two copies of the index, which make a start fast")
    disk_segment_bytes: int = option(256 << 20, "size of one file")
    disk_readers: int = option(4, "threads that read from disk")
    disk_direct: bool = option(True, "read and write around the page cache where block size and file system allow it")
    pipes: tuple[str, ...] = option((AUTO,), PIPES_HELP)
    token_file: str = option("", "file with the shared token that callers must show")
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
        for name in (
            "capacity_bytes",
            "max_blocks_per_call",
            "max_leases",
            "max_fingerprints",
            "pull_workers",
            "max_pending_puts",
            "disk_readers",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}", field=name)
        for name in ("default_lease_s", "max_lease_s", "pull_timeout_s"):
            if not 0.0 < getattr(self, name) <= 3600.0:
                raise ConfigError(f"{name} must be above 0 and at most 3600, got {getattr(self, name)}", field=name)
        if not 0.0 <= self.drain_timeout_s <= 3600.0:
            raise ConfigError(
                f"drain_timeout_s must be in [0, 3600], got {self.drain_timeout_s}", field="drain_timeout_s"
            )
        for name in ("disk_bytes", "disk_segment_bytes"):
            if getattr(self, name) < _MIN_DISK_BYTES:
                raise ConfigError(f"{name} must be at least {_MIN_DISK_BYTES}, got {getattr(self, name)}", field=name)
        for name in ("disk_sync_s", "disk_checkpoint_s"):
            if not 0.0 <= getattr(self, name) <= 3600.0:
                raise ConfigError(f"{name} must be in [0, 3600], got {getattr(self, name)}", field=name)
        if self.default_lease_s > self.max_lease_s:
            raise ConfigError("default_lease_s must be at most max_lease_s", field="default_lease_s")
        check_pipes(self.pipes, without=frozenset({"memory"}))
        for name in ("port", "metrics_port"):
            if not 0 <= getattr(self, name) < 65536:
                raise ConfigError(f"{name} must be between 0 and 65535, got {getattr(self, name)}", field=name)
