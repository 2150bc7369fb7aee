"""Configuration of the router."""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.config.autoscale import KUBERNETES_ACCOUNT, KUBERNETES_ACCOUNT_HELP, KUBERNETES_API_HELP
from baton.config.flags import ServiceConfig, option, require, require_at_least, require_ports
from baton.config.secrets import shown_url
from baton.config.stores import DISCOVER
from baton.errors import ConfigError

_HOST = re.compile(r"^(\*|(\*\.)?[A-Za-z0-9_.\-]+)$")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
"""An origin as browsers send it: scheme and host without a path."""
_ADDRESS = re.compile(r"^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.\-]+):([0-9]{1,5})$")


@dataclass(frozen=True)
class RouterConfig(ServiceConfig):
    """Configuration of one router."""

    host: str = option("127.0.0.1", "address to listen on; off loopback needs --token-file or --tls-cert")
    port: int = option(8000, "port of the OpenAI-compatible HTTP interface; 0: a free one")
    grpc_port: int = option(8001, "port of the gRPC router service; 0: a free one")
    metrics_port: int = option(
        0, "port of its own for /metrics, without API keys; 0: none; on --port they want an administrator's key"
    )
    prefill: tuple[str, ...] = option((), "prefill instances, host:port")
    decode: tuple[str, ...] = option((), "decode instances, host:port")
    kvstore: tuple[str, ...] = option(
        (),
        "KV stores whose contents count as loadable, host:port, named as the instances that use them name them; or "
        "discover, for nodes that register in --redis",
    )
    model: str = option("", "directory with the tokenizer; default: the model path that the instances report")
    policy: str = option(
        "match_minus_load",
        "placement policy, such as cost_ms or session; an unknown name lists all",
    )
    beta: float = option(0.5, "weight of load against KV match rate")
    temperature: float = option(0.0, "softmax temperature of match_minus_load's choice; 0: the best score wins")
    tier_weights: tuple[str, ...] = option(
        ("host=0.8", "disk=0.5", "remote=0.5", "store=0.5", "store_disk=0.3", "store_remote=0.3"),
        "what a block in a slower tier, or in the KV store, counts beside one in device memory",
    )
    session_overload: float = option(3.0, "load relative to the mean from which a session leaves its home")
    max_retention_s: float = option(3600.0, "longest that requests may ask to spare KV")
    policy_options: tuple[str, ...] = option((), "key=value pairs for a policy that a package registered")
    policy_seed: int | None = option(None, "seed of the policy's random choices; default: random")
    remote_prefill_threshold: int | None = option(
        None, "missing prompt tokens from which a prefill instance is used; default: the decode instance's own"
    )
    order: str = option(
        "decode_first",
        "which instance gets a request first; with prefill_first the decode instance is chosen when the prompt is "
        "computed; the header x-baton-order goes before it",
        choices=("decode_first", "prefill_first"),
    )
    prefill_candidates: int = option(3, "prefill instances that a request may try, one after the other")
    kv_events: bool = option(True, "keep an exact index from the instances' KV events")
    index_max_blocks: int = option(4_000_000, "block hashes in the index at most, about 40 bytes each")
    index_stale_limit_s: float = option(30.0, "seconds without events after which an instance's index is not used")
    index_heartbeat_ms: int = option(
        600,
        "longest silence asked of an instance's events, whose news may be gathered for 0.95 of it; after 1.5 times as "
        "long its index is stale; 0: none",
    )
    index_decision_ttl_s: float = option(
        120.0, "seconds that a prompt counts as cached where it was sent, for instances without KV events"
    )
    block_size: int | None = option(None, "tokens per block that instances must have; default: any sizes")
    strict_fields: bool = option(False, "refuse requests with unknown fields")
    max_request_sequences: int = option(1024, "sequences of a completion request at most: prompts times n")
    generation_config: str = option(
        "auto",
        "auto: the model's generation_config.json gives what requests do not set of temperature, top_p, top_k, min_p, "
        "repetition_penalty and max_new_tokens",
        choices=("auto", "off"),
    )
    max_body_bytes: int | None = option(
        None,
        "bytes of an HTTP request's body, or of a client's gRPC message, at most; default: 64 per token of the model's "
        "context, 4 to 16 MiB",
    )
    allow_special_tokens: bool = option(
        False,
        "read names of special tokens in chat messages as those tokens; default: as text; the "
        "request's allow_special_tokens goes before it",
    )
    tool_dialect: str = option(
        "auto",
        "how the model writes tool calls, such as hermes (an unknown name lists all); none: they stay text; default: "
        "as its tokenizer or chat template says, else hermes",
    )
    reasoning_dialect: str = option(
        "auto",
        "how the model sets its reasoning apart, such as think; none: it stays text; default: as its tokenizer or chat "
        "template says",
    )
    api_keys: str = option(
        "",
        "file with clients' API keys: .toml or .json with tenants, else one per line; redis: in --redis; wants "
        "--token-file",
    )
    tenant_secret_file: str = option(
        "", "file with the secret that keeps tenants' caches apart, the same for all routers; default: a random one"
    )
    open_http: bool = option(False, "serve HTTP off loopback although there are no API keys")
    cors_origins: tuple[str, ...] = option(
        (), "origins whose pages may call the HTTP interface from a browser, e.g. https://ui.example; *: all"
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names under which HTTP is reached, e.g. a proxy's, *.example.com, or * for any; default: without API keys on "
        "loopback only local names and addresses, elsewhere any",
    )
    http_tls: bool = option(True, "with --tls-cert, serve HTTP over TLS as well")
    ticket_key_file: str = option(
        "", "file with the key of placement tickets, by which clients reach decode instances; default: no tickets"
    )
    max_in_flight: int = option(4096, "requests in flight at most; more are refused with 429", after="tls_roles")
    instance_slots: int | None = option(
        None,
        "sequences per decode instance beyond which requests wait in the router; 0: never; default: what it can batch "
        "and an eighth more",
    )
    prefill_queue_tokens: int | None = option(
        None,
        "prompt tokens per prefill instance beyond which requests wait in the router; 0: never; default: a second of "
        "work, at least 4096",
    )
    queue_requests: int = option(2048, "requests that may wait in the router; more are refused with 429")
    queue_tokens: int = option(4_000_000, "prompt tokens that may wait in the router")
    queue_tenant_share: float = option(0.5, "how much of both one tenant may have")
    queue_timeout_s: float = option(60.0, "seconds a request may wait in the router, or is refused with 503")
    speculative_prefill: bool = option(
        False,
        "prefill next turns in idle capacity, for requests that ask for it",
    )
    batch_store: str = option(
        "",
        "directory that /v1/files and /v1/batches keep files and batches in, or redis: in --redis; default: they "
        "answer 501",
    )
    batch_file_bytes: int = option(100 << 20, "bytes of a file at most")
    batch_lines: int = option(50_000, "lines of a batch at most")
    batch_tenant_files: int = option(500, "files that a tenant may keep")
    batch_tenant_bytes: int = option(1 << 30, "bytes of all files of a tenant at most")
    batch_tenant_batches: int = option(20, "batches of a tenant that have not ended at most")
    max_retries: int = option(3, "times a request goes to another decode instance after a failure")
    retry_budget: float = option(0.2, "second tries per recent request; an instance that went away costs none")
    breaker_failures: int = option(
        5, "failures in a row after which an instance gets no requests for a while; 0: never"
    )
    breaker_open_s: float = option(1.0, "seconds that an instance gets nothing then; doubles up to 30")
    request_timeout_s: float = option(600.0, "seconds a request may take")
    no_instance_wait_s: float = option(5.0, "seconds a request waits for a decode instance when none is ready")
    lease_ttl_s: float = option(10.0, "seconds without heartbeat after which a registered instance is forgotten")
    max_instances: int = option(1024, "instances that may be known at a time")
    max_inflight_per_instance: int | None = option(
        None,
        "sequences in flight per decode instance at most, of all routers together; 0: what it can batch; default: any "
        "number",
    )
    discover: tuple[str, ...] = option((), "where else to look for instances: redis, kubernetes")
    kubernetes_selector: str = option("", "label selector of the EndpointSlices, e.g. kubernetes.io/service-name=baton")
    kubernetes_port: str = option("grpc", "name of the instances' port in the EndpointSlices")
    kubernetes_namespace: str = option("", "where they are; default: this pod's namespace")
    kubernetes_api: str = option("", KUBERNETES_API_HELP)
    kubernetes_account: str = option(KUBERNETES_ACCOUNT, KUBERNETES_ACCOUNT_HELP)
    redis: str = option(
        "", "URL of a Redis through which several routers share their state; default: none", secret=True
    )
    redis_prefix: str = option("baton", "put before every key in Redis")
    replica_name: str = option("", "what other routers call this one; default: host name and --grpc-port")
    replicas: int = option(0, "routers for which a part of every capacity is kept, whether they are there or not")
    replica_interval_ms: int = option(10, "time between two looks for news for the other routers")
    replica_expectations: bool = option(
        True, "share with other routers, through --redis, hashes of blocks about to be computed"
    )
    replica_forget_s: float = option(60.0, "seconds of silence after which the others take a router's whole part")
    load_interval_ms: int = option(100, "shortest time between two load reports of an instance")
    probe_interval_s: float = option(2.0, "seconds between two probes of an instance that is not heard otherwise")
    probe_timeout_s: float = option(5.0, "seconds an instance has to answer a probe")
    probe_failures: int = option(3, "probes in a row without an answer after which an instance counts as lost")
    reconnect_max_s: float = option(2.0, "longest pause between two attempts to reach an instance")
    drain_timeout_s: float = option(30.0, "seconds running requests get to end on SIGTERM")
    access_log: bool = option(
        False, "a line of the log per request of a client: who, what, status, seconds, request id", after="core_dumps"
    )
    trace_sample_rate: float | None = option(
        None,
        "share of requests that are traced, of those whose caller has not decided by a traceparent; default: as "
        "OTEL_TRACES_SAMPLER says, else all",
        after="otlp_traces_endpoint",
    )

    def __post_init__(self) -> None:
        require(self, ["trace_sample_rate"], lambda x: 0.0 <= x <= 1.0, "be in [0, 1]")
        require_ports(self, "port", "grpc_port", "metrics_port")
        for name in ("prefill", "decode", *(() if self.kvstore == (DISCOVER,) else ("kvstore",))):
            for address in getattr(self, name):
                check_address(address, field=name)
        both = set(self.prefill) & set(self.decode)
        if both or len(set(self.prefill)) < len(self.prefill) or len(set(self.decode)) < len(self.decode):
            raise ConfigError("an instance is named twice in --prefill and --decode", field="decode")
        if len(set(self.kvstore)) < len(self.kvstore):
            raise ConfigError("a store is named twice in --kvstore", field="kvstore")
        if DISCOVER in self.kvstore and not self.redis:
            raise ConfigError("--kvstore discover needs --redis", field="redis")
        require_at_least(self, 1, "prefill_candidates", "index_max_blocks", "max_in_flight", "max_instances")
        require_at_least(self, 1, "load_interval_ms", "probe_failures", "max_request_sequences", "max_body_bytes")
        require_at_least(self, 1, "batch_file_bytes", "batch_lines", "batch_tenant_files", "batch_tenant_bytes")
        require_at_least(self, 1, "batch_tenant_batches")
        require_at_least(self, 0, "max_inflight_per_instance")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"{origin!r} is no origin: http(s)://host[:port] without a path, or *", field="cors_origins"
                )
        self._check_discovery()
        if self.batch_store == "redis" and not self.redis:
            raise ConfigError("--batch-store redis needs --redis", field="redis")
        if self.api_keys == "redis" and not self.redis:
            raise ConfigError("--api-keys redis needs --redis", field="redis")
        if self.api_keys and not self.token_file:
            raise ConfigError(
                "--api-keys needs --token-file: without the services' token who reaches their ports reads the KV of "
                "tenants and registers instances",
                field="token_file",
            )
        for name in self.allowed_hosts:
            if not _HOST.match(name):
                raise ConfigError(f"allowed_hosts: {name!r} is no host name; it has no port", field="allowed_hosts")
        self._check_sharing()
        require_at_least(self, 20, "replica_forget_s")
        require_at_least(self, 1, "replica_interval_ms", "block_size", "queue_tokens")
        require_at_least(self, 0, "replicas", "max_retries", "retry_budget", "breaker_failures", "index_heartbeat_ms")
        require_at_least(
            self, 0, "queue_requests", "instance_slots", "prefill_queue_tokens", "remote_prefill_threshold"
        )
        require(self, ["queue_tenant_share"], lambda x: 0 < x <= 1, "be above 0 and at most 1")
        more_than_0 = ("request_timeout_s", "lease_ttl_s", "probe_interval_s", "probe_timeout_s", "reconnect_max_s")
        require(self, (*more_than_0, "breaker_open_s", "queue_timeout_s"), lambda x: x > 0, "be above 0")
        require_at_least(
            self,
            0,
            "max_retention_s",
            "no_instance_wait_s",
            "drain_timeout_s",
            "index_stale_limit_s",
            "index_decision_ttl_s",
        )

    def _check_discovery(self) -> None:
        """Check the sources of ``--discover`` and the flags that they need."""
        unknown = [source for source in self.discover if source not in ("redis", "kubernetes")]
        if unknown:
            raise ConfigError(f"discover knows redis and kubernetes, not {unknown[0]!r}", field="discover")
        if "redis" in self.discover and not self.redis:
            raise ConfigError("--discover redis needs --redis", field="redis")
        if "kubernetes" in self.discover and not self.kubernetes_selector:
            raise ConfigError("--discover kubernetes needs --kubernetes-selector", field="kubernetes_selector")

    def _check_sharing(self) -> None:
        """Check the flags by which routers share their state through Redis."""
        if self.redis and not self.redis.startswith(("redis://", "rediss://", "unix://")):
            raise ConfigError("redis must be a redis://, rediss:// or unix:// URL", field="redis")
        if not 1 <= len(self.redis_prefix) <= 64:
            raise ConfigError("redis_prefix must have 1 to 64 characters", field="redis_prefix")
        if len(self.replica_name) > 200 or not self.replica_name.isprintable():
            raise ConfigError("replica_name must have at most 200 printable characters", field="replica_name")


def check_address(address: str, *, field: str) -> None:
    """Check that an address is ``host:port``.

    Raises:
        ConfigError: The address has another form; names ``field``.
    """
    match = _ADDRESS.match(address)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ConfigError(f"{shown_url(address)!r} is not host:port", field=field)
