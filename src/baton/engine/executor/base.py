"""What the engine core needs of whatever runs the model, and how an implementation is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.config import EngineConfig
from baton.engine.device import device_failure
from baton.engine.runner.input_batch import ForwardBatch, ForwardOutput, InputBuffers, KVMoves
from baton.errors import InternalError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout
from baton.kv_cache.shards import KVGeometry, KVShards, ShardSpec
from baton.logs import quiet_imports
from baton.plugins import PluginGroup

EXECUTORS = PluginGroup(
    "executor",
    "baton.executors",
    {
        "in_process": "baton.engine.executor.in_process:InProcessExecutor",
        "multiprocess": "baton.engine.executor.multiprocess:MultiprocessExecutor",
    },
)
"""Classes that take the :class:`EngineConfig`: a new built-in one is a file and a line here."""


class ExecutorLostError(InternalError):
    """A process that runs part of the model is gone, or the device: no step can be run any more."""


def raise_if_lost(error: Exception) -> None:
    """Look at what a step has failed with.

    Raises:
        ExecutorLostError: It is that error, or one of the device, after which every step would fail.
    """
    if isinstance(error, ExecutorLostError):
        raise error
    if failure := device_failure(error):
        raise ExecutorLostError(f"the device has failed: {failure}") from error


@dataclass(frozen=True, slots=True)
class Quality:
    """What runs against the reference.

    Attributes:
        kl: Mean Kullback-Leibler divergence of the next token's distribution from the reference's, nats per token.
        top1: Share of tokens after which both think the same token is the most likely one.
        tokens: Tokens that were compared.
    """

    kl: float
    top1: float
    tokens: int

    def __str__(self) -> str:
        return f"KL {self.kl:.2g}, top-1 {self.top1:.3f} over {self.tokens} tokens against exact arithmetic"


class Executor(Protocol):
    """Runs the model, in one process or several. Its life: load, bind, then steps until it is closed.

    Attributes:
        layout: Of the blocks in this process's arena.
        geometry: KV of the whole model.
        shards: The instance's ranks, this process's first; each has an arena.
        fingerprint: Identity of this model's KV.
        vocab_size: Columns of the logits.
        max_model_len: Longest sequence in tokens.
        eos_token_ids: Tokens that end a sequence.
        attention_backend: Name of the attention operator in use.
        description: Which path, attention and linears run the model, for logs.
        quality: How far what runs is from exact arithmetic with the weights that were loaded; ``None``: none of them
            are quantized, or nobody measured it.
        device: Where the model is.
        takes_chosen: Whether a step may be launched before anybody has read what the one before chooses (``chosen`` of
            :class:`ForwardBatch`); those of other packages that say nothing do not.
        input_buffers: Where a step's arrays have to lie; ``None``: anywhere.
        why_no_trees: Why tokens of a step may not be nodes of trees (see :class:`ForwardBatch`); empty: they may.
        on_layer: Called in the middle of a step with a layer's index as soon as all ranks that share this layer have
            written its KV; only layers of this process's pipeline stage are reported.
    """

    shards: tuple[ShardSpec, ...]
    layout: KVLayout
    geometry: KVGeometry
    fingerprint: Fingerprint
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    attention_backend: str
    description: str
    quality: Quality | None
    device: torch.device
    takes_chosen: bool
    input_buffers: InputBuffers | None

    @property
    def why_no_trees(self) -> str:
        """See the attributes."""

    @property
    def on_layer(self) -> Callable[[int], None] | None:
        """See the attributes."""

    @on_layer.setter
    def on_layer(self, function: Callable[[int], None] | None) -> None: ...

    def load(self) -> None:
        """Load the model on all ranks; the other attributes are there afterwards.

        Raises:
            ConfigError: The model cannot be loaded, not be served or not be divided so; names the field.
        """

    def bind(self, shards: KVShards) -> None:
        """Use arenas, one per rank, as the KV pool.

        Raises:
            ConfigError: The arenas are not one per rank, or their blocks have another size.
        """

    def trial_run(self, num_tokens: int) -> None:
        """Run one prompt of ``num_tokens`` tokens over memory of its own, for its time and memory."""

    def graph_bytes(self) -> int:
        """Measure what captured decode steps will take on each rank's device at most, beside weights and pool."""

    def peak_bytes(self, num_tokens: int) -> list[int]:
        """Return what such a run takes of each rank's GPU at its peak, in bytes; of GPUs alone."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one step: write the new tokens' KV into the pool and return the logits.

        Args:
            batch: Its arrays must not change until this returns.

        Raises:
            ExecutorLostError: A process that runs part of the model is gone; any other error concerns this step alone.
        """

    def move_kv(self, moves: KVMoves) -> None:
        """Move KV within the pool, on all ranks; of tokens of the last step that were accepted.

        Raises:
            ExecutorLostError: A process that runs part of the model is gone.
        """

    def watch(self, on_lost: Callable[[ExecutorLostError], None]) -> None:
        """Have a function called, in any thread, when a process that runs part of the model dies, or has died."""

    def close(self) -> None:
        """End the other processes that run the model; harmless if repeated."""


def load_executor(config: EngineConfig) -> Executor:
    """Choose an executor and load the model.

    Sets this process's number of intra-op threads, which torch has only one of.

    Raises:
        ConfigError: There is no such executor, or the model can't be loaded or served; names the field.
    """
    name = config.executor
    if name == "auto":
        name = "multiprocess" if config.tp * config.pp > 1 else "in_process"
    torch.set_num_threads(config.threads)
    with quiet_imports():
        implementation = EXECUTORS.load(name, other_names=["auto"])
    executor: Executor = implementation(config)
    try:
        executor.load()
    except BaseException:
        executor.close()
        raise
    return executor
