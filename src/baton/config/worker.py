"""Configuration of prefill and decode instances: the engine, and the service around it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from baton.config.flags import CLEAR_KV_HELP, ServiceConfig, option, require, require_at_least, require_ports
from baton.config.pipes import AUTO, PIPES_HELP, check_pipes
from baton.config.stores import StoreAddress
from baton.errors import ConfigError
from baton.types import MAX_SPECULATIVE_TOKENS, MAX_SPECULATIVE_WIDTH

BUILT_IN_DRAFTERS = {
    "draft": "baton.engine.speculation.chain:load_draft_model",
    "eagle": "baton.engine.speculation.eagle:load_eagle",
    "eagle3": "baton.engine.speculation.eagle:load_eagle",
    "medusa": "baton.engine.speculation.medusa:load_medusa",
    "mtp": "baton.engine.speculation.eagle:load_mtp",
    "ngram": "baton.engine.speculation.lookup:NgramDrafter",
    "suffix": "baton.engine.speculation.lookup:SuffixDrafter",
}
"""Methods of ``speculative``, by which the engine loads them: a new one is a file and a line here."""
_CHAINS = {"none", "ngram", "draft"}
"""Methods of ``speculative`` that draft a single continuation, not a tree."""
_SNAPSHOT = re.compile(r"(?:^|/)models--([^/]+)--([^/]+)/snapshots/[^/]+$")
"""Folder of a model in the Hugging Face hub's cache."""
MAX_RANKS = 64
"""Largest number of processes of one engine; all of them run on one host."""


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of one engine: the model, its KV pool and its scheduler."""

    model: str = option("models/baton-tiny", "model: a directory, a GGUF file, or a hub name")
    served_model_name: str = option(
        "",
        "names clients use for the model, separated by commas; answers have the one that was asked for; default: the "
        "last part of --model, its name on the hub, and --model",
    )
    dtype: str = option("auto", "weights and activations", choices=("auto", "float32", "bfloat16", "float16"))
    quantization: str = option(
        "none",
        "quantize the weights of linear layers and experts while a plain checkpoint is loaded: int8 and fp8 (a scale "
        "per output channel), int4 and nf4 (per 64 inputs); a checkpoint that is quantized needs no flag",
        choices=("none", "int8", "int4", "fp8", "nf4"),
    )
    quantization_ignore: tuple[str, ...] = option(
        ("lm_head", r"\.gate$", r"\.router$"), "regular expressions of modules that --quantization leaves as they are"
    )
    quantized_activations: str = option(
        "auto",
        "inputs of quantized weights: auto (as the checkpoint says), none (multiplied exactly), int8 (rounded with a "
        "scale per token: faster)",
        choices=("auto", "none", "int8"),
    )
    device: str = option(
        "cpu",
        "where the model runs: cpu, cuda:0, ...; with --tp and --pp the first rank's GPU, the others have those that "
        "follow, or one for each rank (cuda:0,cuda:2); interpret: what runs on GPUs, in Triton's interpreter, for "
        "tests (TRITON_INTERPRET=1)",
    )
    cuda_graphs: tuple[str, ...] = option(
        ("on",),
        "on a GPU, batch sizes whose decode steps are captured and replayed: on (1, 2, 4 and multiples of 8 up to "
        "--max-num-seqs), off, or sizes as 1,8,32",
    )
    async_scheduling: str = option(
        "auto",
        "launch the next step before the tokens of the one before are read, so that the device does not wait for the "
        "scheduler; auto: on a GPU, without speculative decoding",
        choices=("auto", "on", "off"),
    )
    threads: int = option(1, "intra-op threads of each process on a CPU")
    tp: int = option(1, "tensor parallelism: processes that share each layer's heads")
    pp: int = option(1, "pipeline parallelism: stages of layers, each in tp processes of its own")
    block_size: int = option(16, "tokens per KV block")
    kv_blocks: int | None = option(None, "KV blocks in the pool; default: what --kv-memory-fraction holds")
    kv_memory_fraction: float | None = option(
        None,
        "share of the memory left after loading, and on a GPU after graphs, that the KV pool may take; default: 0.2, "
        "on a GPU 0.9",
    )
    max_model_len: int | None = option(None, "longest sequence in tokens; default: the model's own")
    max_num_seqs: int = option(64, "sequences in one batch")
    max_num_batched_tokens: int = option(2048, "tokens in one step, prompt chunks and decodes together")
    prefill_chunk: int = option(512, "longest chunk of one prompt in one step, in tokens")
    step_budget_ms: float | None = option(
        None,
        "longest step while requests wait for their next token, in milliseconds: beside decodes, prompts get what is "
        "left of it, by measured costs; 0: no bound; default: on decode instances 50, or twice the time of the decodes "
        "alone, on prefill instances and offline no bound",
    )
    itl_slo_ms: float | None = option(
        None,
        "time between two tokens of a stream that is to be kept, in milliseconds: a step's budget is four fifths of it",
    )
    max_queue: int = option(1024, "requests that may wait; more are refused with 429")
    max_loads: int | None = option(
        None,
        "requests whose KV may be on its way from outside at once, beside those of the batch; default: 4 times "
        "--max-num-seqs",
    )
    load_share: float = option(
        0.75, "part of the KV pool that requests may hold whose KV is on its way; one request alone may hold more"
    )
    policy: str = option(
        "fcfs",
        "order of the queue; under priority a request also preempts what is less important",
        choices=("fcfs", "priority"),
    )
    prefix_caching: bool = option(True, "reuse KV of earlier requests with the same prefix")
    state_every: int = option(2048, "tokens between snapshots of recurrent states, which a cached prefix needs, too")
    layer_groups: bool = option(
        True,
        "models with sliding-window layers beside others: blocks per group of layers, given back when no window "
        "reaches them; on decode instances without a KV store or other connectors, and in LLM",
    )
    tenant_cache_share: float = option(
        0.5,
        "part of the KV pool that is divided equally among tenants with API keys: what is cached within it goes after "
        "what others have beyond theirs; 0: the least recently used go",
    )
    kv_load_failure: str = option(
        "recompute",
        "when KV from outside does not come: compute what is missing here, or fail the request",
        choices=("recompute", "fail"),
    )
    kv_dtype: str = option(
        "auto",
        "how KV is kept; auto: as --dtype; int8: in half of bfloat16's bytes, with a scale per token and head in the "
        "block; fp8_e4m3: with the checkpoint's scales; bfloat16: also where --dtype is float32",
        choices=("auto", "bfloat16", "float16", "float32", "int8", "fp8_e4m3"),
    )
    kv_skip_layers: tuple[str, ...] = option(
        (), "layers whose KV stays as --dtype where --kv-dtype is int8 or fp8_e4m3: numbers, first, last, sliding"
    )
    kv_cast: bool = option(
        False,
        "take KV of another dtype from other instances, converted while it is loaded; what this instance holds is then "
        "kept apart from KV that was computed in its dtype",
    )
    attention_backend: str = option(
        "auto",
        "attention operator: auto, cpp, torch, triton, flashinfer (if installed), or one of an installed package",
    )
    packed_linears: bool = option(True, "repack weights for the processor (bfloat16 on a CPU)")
    executor: str = option(
        "auto",
        "what runs the model: auto, in_process, multiprocess (tp, pp), or one of an installed package",
    )
    grammar_backend: str = option(
        "auto",
        "what constrains answers to grammars (response_format, structured_outputs): auto, llguidance, none, or one of "
        "an installed package; auto: none for a model without tokenizer.json",
    )
    speculative: str = option(
        "none",
        "speculative decoding: who drafts tokens, of which a step verifies several; none, ngram (what followed the "
        "last tokens before), suffix (in the tenant's earlier answers too), draft (a smaller model), eagle, eagle3, "
        "medusa (heads trained for this model), mtp (its own next-token layer), or an installed package's; no token "
        "changes",
    )
    speculative_model: str = option(
        "",
        "draft: the model that drafts, with the same tokenizer; eagle, eagle3, medusa: the heads; a local path or a "
        "hub name",
    )
    speculative_acceptance: str = option(
        "equal",
        "which drafts are kept: equal (those that would have been sampled: no token changes), rejection (by min(1, p / "
        "q): more of what a draft model drew; tokens are distributed as without, but are not the same)",
        choices=("equal", "rejection"),
    )
    speculative_tp: int = option(1, "draft: tensor parallelism of that model")
    speculative_tokens: int | None = option(
        None,
        f"draft tokens per sequence and step, 1 to {MAX_SPECULATIVE_TOKENS}; default: as many as pay by measured times "
        "of steps and each sequence's acceptance, or none",
    )
    speculative_width: int = option(
        1,
        f"trees of draft tokens, 1 to {MAX_SPECULATIVE_WIDTH}: so many alternatives at each place, of which one may be "
        "right (suffix, eagle, eagle3, medusa, mtp); --speculative-tokens is how many follow each other; 1: chains",
    )
    seed: int = option(0, "seed for requests that bring none")

    def __post_init__(self) -> None:
        require_at_least(self, 1, "threads", "tp", "pp", "block_size", "max_num_seqs", "max_num_batched_tokens")
        require_at_least(self, 1, "prefill_chunk", "max_queue", "kv_blocks", "max_model_len", "max_loads")
        if self.speculative_model and self.speculative in {"none", "ngram", "suffix", "mtp"}:
            raise ConfigError(f"speculative {self.speculative} takes no speculative_model", field="speculative_model")
        require(self, ["speculative_tp"], lambda x: 1 <= x <= MAX_RANKS, f"be between 1 and {MAX_RANKS}")
        most = MAX_SPECULATIVE_TOKENS
        require(self, ["speculative_tokens"], lambda x: 1 <= x <= most, f"be between 1 and {most}")
        self._check_width()
        require(self, ["step_budget_ms"], lambda x: 0.0 <= x < math.inf, "not be negative")
        require(self, ["itl_slo_ms"], lambda x: 0.0 < x < math.inf, "be positive")
        if self.tp * self.pp > MAX_RANKS:
            raise ConfigError(f"tp * pp must be at most {MAX_RANKS}, got {self.tp * self.pp}", field="tp")
        self._check_devices()
        if self.served_model_name and not all(name.strip() for name in self.served_model_name.split(",")):
            raise ConfigError(
                f"served_model_name must be names separated by commas, got {self.served_model_name!r}",
                field="served_model_name",
            )
        require(self, ["tenant_cache_share"], lambda x: 0.0 <= x <= 1.0, "be in [0, 1]")
        require(self, ["load_share"], lambda x: 0.0 < x <= 1.0, "be in (0, 1]")
        _check_graphs(self.cuda_graphs)
        require(self, ["kv_memory_fraction"], lambda x: 0.0 < x <= 0.95, "be in (0, 0.95]")

    def _check_devices(self) -> None:
        """Check that a list of devices has one device for each rank."""
        names = self.device.split(",")
        if len(names) == 1:
            return
        if len(names) != self.tp * self.pp:
            ranks = f"tp {self.tp} and pp {self.pp} make {self.tp * self.pp} ranks"
            raise ConfigError(f"device names {len(names)} devices, but {ranks}", field="device")
        if len(set(names)) < len(names) or not all(name.startswith("cuda:") for name in names):
            raise ConfigError(f"device {self.device!r}: a list is of different GPUs, as cuda:0,cuda:1", field="device")

    def _check_width(self) -> None:
        """Check ``speculative_width``, and that method and acceptance support trees."""
        width = self.speculative_width
        field = "speculative_width"
        most = MAX_SPECULATIVE_WIDTH
        require(self, [field], lambda x: 1 <= x <= most, f"be between 1 and {most}")
        why = ""
        if self.speculative in _CHAINS:
            why = f"speculative {self.speculative} has no trees"
        elif self.speculative_acceptance != "equal":
            why = "acceptance by rejection is of chains, whose tokens were drawn one after the other"
        if width > 1 and why:
            raise ConfigError(f"{field} must be 1, got {width}: {why}", field=field)

    @property
    def pool_fraction(self) -> float:
        """Share of the free memory that the KV pool may use."""
        if self.kv_memory_fraction is not None:
            return self.kv_memory_fraction
        return 0.9 if self.device.startswith("cuda") else 0.2

    @property
    def graph_sizes(self) -> list[int]:
        """Batch sizes whose decode steps are captured, ascending; empty on a CPU."""
        if self.device.startswith("cpu") or self.cuda_graphs == ("off",):
            return []
        most = self.max_num_seqs
        if self.cuda_graphs == ("on",):
            return sorted({size for size in (1, 2, 4, most) if size <= most}.union(range(8, most, 8)))
        return sorted({min(int(size), most) for size in self.cuda_graphs})

    @property
    def model_name(self) -> str:
        """Model name that clients use, of several the first."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """All model names that clients may use; a snapshot in the hub's cache has its hub name, too."""
        if self.served_model_name:
            return tuple(dict.fromkeys(name.strip() for name in self.served_model_name.split(",")))
        path = self.model.rstrip("/")
        snapshot = _SNAPSHOT.search(path)
        name = f"{snapshot[1]}/{snapshot[2]}" if snapshot else path
        return tuple(dict.fromkeys((name.rsplit("/", 1)[-1].removesuffix(".gguf"), name, path)))


def _check_graphs(values: tuple[str, ...]) -> None:
    sizes = all(value.isascii() and value.isdigit() and len(value) <= 6 and int(value) > 0 for value in values)
    if values not in {("on",), ("off",)} and not (values and sizes):
        raise ConfigError(
            f"cuda_graphs must be on, off, or batch sizes as 1,8,32; got {','.join(values) or 'nothing'}",
            field="cuda_graphs",
        )


@dataclass(frozen=True)
class WorkerConfig(ServiceConfig):
    """Configuration of one prefill or decode service."""

    host: str = option("127.0.0.1", "address to listen on; off loopback it needs --token-file or --tls-cert")
    port: int = option(0, "gRPC port; 0 takes a free one")
    kv_port: int = option(0, "port of the tcp pipe; 0 takes a free one")
    metrics_port: int = option(0, "port of /metrics; 0: none")
    instance_id: str = option("", "name of this instance; default: role, host and port")
    advertise: str = option("", "host:port under which others reach this instance; default: where it listens")
    routers: tuple[str, ...] = option((), "gRPC addresses of routers to register with")
    redis: str = option("", "URL of a Redis to register in, for routers with --discover redis", secret=True)
    redis_prefix: str = option("baton", "put before every key in Redis")
    pipes: tuple[str, ...] = option((AUTO,), PIPES_HELP)
    layerwise: bool = option(True, "prefill: offer KV, and save it, layer by layer while it is computed")
    kv_streams: int = option(4, "TCP connections that one big fetch is split over")
    kv_checksums: bool = option(True, "compare checksums of KV that came over a network")
    fetch_threads: int = option(16, "fetches that copy KV from one source at once; what waits holds no thread")
    clear_kv: bool = option(False, CLEAR_KV_HELP, after="tls_roles")
    ticket_key_file: str = option(
        "", "decode: file with the key of placement tickets; a client that comes without a router must show one"
    )
    kvstore: str = option(
        "",
        "KV store to load from and save to: host:port of its nodes; discover: those that register in --redis; "
        "redis://..., redis+cluster://... or mooncake://... without a KV store process; default: none",
        secret=True,
    )
    kvstore_replication: int = option(1, "nodes of the KV store that get each block; 1 or 2")
    kvstore_hot_loads: float = option(
        20.0, "loads per second from which on part of a prompt gets another replica in the KV store; 0: never"
    )
    kvstore_ttl_s: float = option(3600.0, "seconds that a Redis keeps a block after its last use; 0: for ever")
    kvstore_decode_saves: bool = option(
        True, "decode: save to the KV store too, what it generated included, for the next turn of a conversation"
    )
    kv_tier_dtype: str = option(
        "auto",
        "how KV stores, files and host memory keep KV, converted on the way there and back; auto: as --kv-dtype; any "
        "other needs --kv-cast, and instances that share a store have the same",
        choices=("auto", "float32", "bfloat16", "float16", "int8"),
    )
    kv_connectors: tuple[str, ...] = option(
        (),
        "connectors asked before the KV store and prefill instances: offload, shared_storage, or installed packages'",
    )
    kv_connector_options: tuple[str, ...] = option((), "their options, as connector.key=value")
    remote_prefill_threshold: int = option(64, "missing prompt tokens from which decode asks a prefill instance")
    prefill_stall_s: float = option(
        30.0,
        "seconds of silence after which a prefill instance is given up; one that computes prompts reports progress "
        "every second",
    )
    prefill_wait_s: float = option(
        60.0,
        "decode: a prompt that would still wait so many seconds in a prefill instance's queue, as that expects it, is "
        "given to the next one or computed here; one that is being computed stays",
    )
    lease_s: float = option(120.0, "seconds that finished blocks are kept for a reader that does not come")
    max_leases: int = option(256, "prompts that may be computed or kept for readers at once; more are refused with 429")
    unclaimed_share: float = option(
        0.5, "prefill: part of the KV blocks that prompts may hold that no decode instance has claimed (prefill_first)"
    )
    step_timeout_s: float = option(
        300.0, "seconds after which an engine step that has not ended is given up, and the process ends; 0: never"
    )
    load_interval_ms: int = option(100, "shortest time between two load reports")
    kv_events: bool = option(True, "tell routers what the prefix cache holds; else they go by their own decisions")
    drain_timeout_s: float = option(30.0, "seconds that running requests get at shutdown")

    def __post_init__(self) -> None:
        require_ports(self, "port", "kv_port", "metrics_port")
        times = "prefill_stall_s", "prefill_wait_s", "lease_s", "load_interval_ms"
        require(self, (*times, "max_leases", "kv_streams", "fetch_threads"), lambda x: x > 0, "be positive")
        require(self, ["step_timeout_s"], lambda x: 0.0 <= x < math.inf, "not be negative")
        require(self, ["unclaimed_share"], lambda x: 0.0 < x <= 1.0, "be above 0 and at most 1")
        check_pipes(self.pipes)
        for name, addresses in (
            ("routers", self.routers),
            ("advertise", (self.advertise,)),
        ):
            for address in filter(None, addresses):
                host, _, port = address.rpartition(":")
                if not host or not port.isdigit():
                    raise ConfigError(f"{name}: {address!r} is not host:port", field=name)
        if self.kvstore and StoreAddress.parse(self.kvstore).discover and not self.redis:
            raise ConfigError("--kvstore discover needs --redis, where the nodes register", field="redis")
        require(self, ["kvstore_replication"], lambda x: x in (1, 2), "be 1 or 2")
        require(self, ["kvstore_hot_loads", "kvstore_ttl_s"], lambda x: 0.0 <= x <= 1e9, "not be negative")
        if self.host in {"0.0.0.0", "::", "[::]"} and not self.advertise:
            raise ConfigError(f"listening on {self.host} needs --advertise: others cannot dial it", field="advertise")
