"""Configuration of the KV store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from baton.config.flags import (
    CLEAR_KV_HELP,
    ServiceConfig,
    option,
    options_by_name,
    require,
    require_at_least,
    require_ports,
)
from baton.config.pipes import AUTO, PIPES_HELP, check_pipes
from baton.errors import ConfigError

_MOST_BYTES = 1 << 48
_MOST_PULL_WORKERS = 1024
_MIN_DISK_BYTES = 1 << 20
_WRITE = ("evicted", "all")

BUILT_IN_TIERS: Mapping[str, str] = MappingProxyType(
    {
        "disk": "baton_kvstore.tiers.open:open_disk",
        "redis": "baton_kvstore.tiers.open:open_redis",
        "object": "baton_kvstore.tiers.open:open_objects",
    }
)
"""Factories of the tiers behind memory, as ``module:function``; a new tier is a file and a line here."""

EVICTION_POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "lru": "baton_kvstore.memory.eviction:Lru",
        "s3fifo": "baton_kvstore.memory.eviction:S3Fifo",
    }
)
"""Eviction policies by their ``--eviction`` names; a new policy is a class and a line here."""


@dataclass(frozen=True)
class TierConfig:
    """Memory and the tiers behind it. Times in seconds, sizes in bytes."""

    capacity_bytes: int = option(1 << 30, "memory for blocks, all models together")
    eviction: str = option("lru", "which blocks leave memory first", choices=tuple(EVICTION_POLICIES))
    memory_full: float = option(
        0.75, "share of --capacity-bytes above which the blocks unused for longest are written to the tier behind"
    )
    memory_spare: float = option(0.25, "share of --capacity-bytes kept free or evictable then")
    tiers: tuple[str, ...] = option(
        tuple(BUILT_IN_TIERS),
        "tiers behind memory, the fastest first: those of Baton's own that are configured, and other packages' by name",
    )
    tier_options: tuple[str, ...] = option((), "options of other packages' tiers: TIER.KEY=VALUE,...")
    disk_path: str = option("", "directory, of its own, for blocks that memory has no room for; default: none")
    disk_bytes: int = option(16 << 30, "size of the files in --disk-path, all together")
    disk_write: str = option("evicted", "blocks that go to disk", choices=_WRITE)
    disk_sync_s: float = option(1.0, "longest time after which a block written to disk survives a loss of power")
    disk_checkpoint_s: float = option(30.0, "time between two copies of the index, which make a start fast")
    disk_segment_bytes: int = option(256 << 20, "size of one file")
    disk_readers: int = option(4, "threads that read from disk")
    disk_direct: bool = option(True, "read and write around the page cache where block size and file system allow it")
    redis_url: str = option(
        "", "Redis for blocks that faster tiers have no room for, redis://host:port/0; default: none", secret=True
    )
    redis_cluster: bool = option(False, "--redis-url names a node of a cluster")
    redis_prefix: str = option("baton:kv", "what keys begin with; stores that share blocks have the same")
    redis_write: str = option("evicted", "blocks that go to Redis", choices=_WRITE)
    redis_ttl_s: float = option(86400.0, "life of a block in Redis since it was written; 0: no end")
    redis_bytes: int = option(
        0, "memory of Redis above which this store deletes the coldest blocks it knows of; 0: maxmemory bounds Redis"
    )
    redis_timeout_s: float = option(1.0, "longest wait for Redis to connect or to say something")
    object_url: str = option(
        "", "object store for blocks that no other tier has room for, as fsspec names it; default: none", secret=True
    )
    object_write: str = option("evicted", "blocks that go to the object store", choices=_WRITE)
    object_timeout_s: float = option(20.0, "longest time of one batch of requests to the object store")
    object_requests: int = option(32, "requests to the object store side by side")
    known_blocks: int = option(
        262144, "blocks of Redis, and as many of the object store, that this store knows of without asking"
    )
    lookup_timeout_s: float = option(
        0.25, "longest time that Get and Contains wait to learn of blocks that other stores wrote"
    )
    lookup_again_s: float = option(1.0, "time after which a block that was not found may be looked for again")
    raise_after: int = option(2, "reads from a slower tier that bring a block back to the first one; 0: none do")

    def check_tiers(self) -> None:
        """Raise :class:`ConfigError` if a value is out of bounds or contradicts another one."""
        if len(set(self.tiers)) != len(self.tiers):
            raise ConfigError(f"tiers names one twice: {','.join(self.tiers)}", field="tiers")
        for name, url in (("disk", self.disk_path), ("redis", self.redis_url), ("object", self.object_url)):
            if url and name not in self.tiers:
                raise ConfigError(f"the {name} tier is configured, but tiers does not name it", field="tiers")
        options_by_name(self.tiers, self.tier_options, field="tier_options")
        require_at_least(self, 1, "capacity_bytes", "disk_readers", "object_requests", "known_blocks")
        require(self, ("capacity_bytes",), lambda x: x <= _MOST_BYTES, f"be at most {_MOST_BYTES}")
        require_at_least(self, _MIN_DISK_BYTES, "disk_bytes", "disk_segment_bytes")
        require(self, ("redis_bytes", "redis_ttl_s", "raise_after"), lambda x: x >= 0, "not be negative")
        pauses = "disk_sync_s", "disk_checkpoint_s", "lookup_again_s"
        require(self, pauses, lambda x: 0.0 <= x <= 3600.0, "be in [0, 3600]")
        timeouts = "redis_timeout_s", "object_timeout_s", "lookup_timeout_s"
        require(self, timeouts, lambda x: 0.0 < x <= 3600.0, "be above 0 and at most 3600")
        require(self, ("memory_full", "memory_spare"), lambda x: 0.0 <= x <= 1.0, "be in [0, 1]")
        if self.redis_url and not self.redis_prefix:
            raise ConfigError("redis_prefix must not be empty", field="redis_prefix")


@dataclass(frozen=True)
class KVStoreConfig(TierConfig, ServiceConfig):
    """Configuration of one KV store process. Times in seconds, sizes in bytes."""

    host: str = option("127.0.0.1", "address to listen on; off loopback only with --token-file or --tls-cert")
    port: int = option(0, "gRPC port; 0: a free one")
    advertise_host: str = option("", "host under which instances reach this store's blocks; default: --host")
    instance_id: str = option("", "name of this store; default: kvstore-<random>")
    register_redis: str = option(
        "",
        "URL of a Redis to register in, as one of several nodes, for instances with --kvstore discover",
        secret=True,
    )
    register_prefix: str = option("baton", "put before every key there; instances call it --redis-prefix")
    tenant_bytes: int = option(
        0, "memory that the blocks of a tenant may take whose API key has no kv_bytes; 0: any amount"
    )
    tenant_disk_bytes: int = option(0, "the same on disk, for a tenant whose API key has no kv_disk_bytes")
    pipes: tuple[str, ...] = option((AUTO,), PIPES_HELP)
    clear_kv: bool = option(False, CLEAR_KV_HELP, after="tls_roles")
    kv_port: int = option(
        0,
        "port of the tcp pipe of the first kind of KV; others take the next ports; 0: free ports",
    )
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

    def __post_init__(self) -> None:
        self.check_tiers()
        require_at_least(self, 1, "max_blocks_per_call", "max_leases", "max_fingerprints")
        require_at_least(self, 1, "pull_workers", "max_pending_puts")
        require(self, ("pull_workers",), lambda x: x <= _MOST_PULL_WORKERS, f"be at most {_MOST_PULL_WORKERS}")
        require_at_least(self, 0, "tenant_bytes", "tenant_disk_bytes")
        times = "default_lease_s", "max_lease_s", "pull_timeout_s"
        require(self, times, lambda x: 0.0 < x <= 3600.0, "be above 0 and at most 3600")
        require(self, ("drain_timeout_s",), lambda x: 0.0 <= x <= 3600.0, "be in [0, 3600]")
        if self.default_lease_s > self.max_lease_s:
            raise ConfigError("default_lease_s must be at most max_lease_s", field="default_lease_s")
        check_pipes(self.pipes, without=frozenset({"memory"}))
        require_ports(self, "port", "kv_port", "metrics_port")
