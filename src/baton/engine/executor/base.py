"""The executor protocol: what the engine core needs of the code that runs the model, and how one is chosen."""

from __future__ import annotations

import logging
import time
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

log = logging.getLogger(__name__)

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
    """A process that runs part of the model died, or the device failed: no further step can run."""


def raise_if_lost(error: Exception) -> None:
    """Raise if a step's error means that every further step would fail too.

    Raises:
        ExecutorLostError: A rank is gone, or the device failed.
    """
    if isinstance(error, ExecutorLostError):
        raise error
    if failure := device_failure(error):
        raise ExecutorLostError(f"the device has failed: {failure}") from error


@dataclass(frozen=True, slots=True)
class Quality:
    """Distance of the running model from the reference.

    Attributes:
        kl: Mean Kullback-Leibler divergence of the next token's distribution from the reference's, nats per token.
        top1: Share of positions at which both have the same most likely token, 0 to 1.
        tokens: Number of positions compared.
    """

    kl: float
    top1: float
    tokens: int

    def __str__(self) -> str:
        return f"KL {self.kl:.2g}, top-1 {self.top1:.3f} over {self.tokens} tokens against exact arithmetic"


class Executor(Protocol):
    """Runs the model, in one process or several. Order of calls: load, bind, then steps until it is closed.

    Attributes:
        layout: Layout of the blocks in this process's arena.
        geometry: Shapes of the whole model's KV.
        shards: The instance's ranks, this process's first; each has an arena.
        fingerprint: Identity of this model's KV.
        vocab_size: Columns of the logits.
        max_model_len: Longest sequence in tokens.
        eos_token_ids: Tokens that end a sequence.
        attention_backend: Name of the attention operator in use.
        description: Which path, attention and linears run the model, for logs.
        quality: Distance of the running model from exact arithmetic over the loaded weights; ``None``: no weights are
            quantized, or it was not measured.
        device: Device of this process's part of the model.
        takes_chosen: Whether a step may be launched before the host has read the previous step's tokens (``chosen`` of
            :class:`ForwardBatch`). Executors of other packages without this attribute do not.
        state_blocks: Number of blocks that hold the recurrent states of a sequence; 0: the model has none.
        input_buffers: Provides the memory of a step's arrays; ``None``: any arrays will do.
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
    state_blocks: int
    input_buffers: InputBuffers | None

    @property
    def why_no_trees(self) -> str: ...

    @property
    def on_layer(self) -> Callable[[int], None] | None: ...

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

    def warm_up(self) -> None:
        """Compile what steps will launch, over the bound pool, before any of its blocks is in use.

        Executors of other packages without this method compile in the middle of steps, if they do at all.
        """

    def trial_run(self, num_tokens: int) -> None:
        """Run one prompt of ``num_tokens`` tokens over memory of its own, for its time and memory."""

    def graph_bytes(self) -> int:
        """Return the most bytes that captured decode steps take on any rank's device, beside weights and pool."""

    def peak_bytes(self, num_tokens: int) -> list[int]:
        """Return the peak bytes of such a run on each rank's GPU; called on GPUs only."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run one step: write the new tokens' KV into the pool and return the logits.

        Args:
            batch: The step; its arrays must not change until this returns.

        Raises:
            ExecutorLostError: A process that runs part of the model is gone; any other error concerns this step alone.
        """

    def move_kv(self, moves: KVMoves) -> None:
        """Move KV of accepted draft tokens of the last step within the pool, on all ranks.

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
    log.info("loading %s", config.model)
    started_s = time.monotonic()
    try:
        executor.load()
    except BaseException:
        executor.close()
        raise
    log.info("loaded %s in %.1f s", config.model, time.monotonic() - started_s)
    return executor
