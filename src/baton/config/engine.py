"""What an engine can be told."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.flags import option
from baton.errors import ConfigError

MAX_RANKS = 64
"""Processes of one engine; all of them run on one host."""


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of one engine: the model, its KV pool and its scheduler."""

    model: str = option("models/baton-tiny", "model: a local path or a hub name")
    served_model_name: str = option("", "name clients use for the model; default: the last part of --model")
    dtype: str = option("auto", "weights and KV", choices=("auto", "float32", "bfloat16", "float16"))
    device: str = option("cpu", "torch device, e.g. cpu, cuda:0")
    threads: int = option(1, "intra-op threads of each process on a CPU")
    tp: int = option(1, "tensor parallelism: processes that share each layer's heads")
    pp: int = option(1, "pipeline parallelism: stages of layers, each in tp processes of its own")
    block_size: int = option(16, "tokens per KV block")
    kv_blocks: int | None = option(None, "KV blocks in the pool; default: what --kv-memory-fraction holds")
    kv_memory_fraction: float = option(0.2, "share of the memory left after loading that the KV pool may take")
    max_model_len: int | None = option(None, "longest sequence in tokens; default: the model's own")
    max_num_seqs: int = option(64, "sequences in one batch")
    max_num_batched_tokens: int = option(2048, "tokens in one step, prompt chunks and decodes together")
    prefill_chunk: int = option(512, "longest chunk of one prompt in one step, in tokens")
    max_queue: int = option(1024, "requests that may wait; more are refused with 429")
    policy: str = option("fcfs", "order of the queue", choices=("fcfs", "priority"))
    prefix_caching: bool = option(True, "reuse KV of earlier requests with the same prefix")
    kv_load_failure: str = option(
        "recompute",
        "when KV from outside does not come: compute what is missing here, or fail the request",
        choices=("recompute", "fail"),
    )
    kv_cast: bool = option(
        False,
        "take KV of another dtype from other instances, converted while it is loaded; what this instance holds is then "
        "kept apart from KV that was computed in its dtype",
    )
    attention_backend: str = option("auto", "attention operator: auto, cpp, torch, or one of an installed package")
    packed_linears: bool = option(True, "repack weights for the processor (bfloat16 on a CPU)")
    executor: str = option(
        "auto",
        "what runs the model: auto, in_process, multiprocess (tp, pp), or one of an installed package",
    )
    seed: int = option(0, "seed for requests that bring none")

    def __post_init__(self) -> None:
        sizes = ("threads", "tp", "pp", "block_size", "max_num_seqs", "max_num_batched_tokens")
        for name in (*sizes, "prefill_chunk", "max_queue"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}", field=name)
        for name in ("kv_blocks", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", field=name)
        if self.tp * self.pp > MAX_RANKS:
            raise ConfigError(f"tp * pp must be at most {MAX_RANKS}, got {self.tp * self.pp}", field="tp")
        if self.tp * self.pp > 1 and not self.device.startswith("cpu"):
            raise ConfigError(f"tp and pp work on device cpu only, got {self.device}", field="device")
        if not 0.0 < self.kv_memory_fraction <= 0.95:
            raise ConfigError(
                f"kv_memory_fraction must be in (0, 0.95], got {self.kv_memory_fraction}", field="kv_memory_fraction"
            )

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]
