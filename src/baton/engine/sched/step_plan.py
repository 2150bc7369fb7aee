"""One step's work, flattened: the seam between scheduler and model runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from baton.errors import InternalError
from baton.kv_cache.fingerprint import Fingerprint
from baton.kv_cache.layout import KVLayout
from baton.kv_cache.shards import KVGeometry, KVShards, ShardSpec

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A ragged batch of S sequences with T tokens in all; prompt chunks and decodes mix freely.

    Attributes:
        token_ids: int64 [T], the sequences' new tokens one after the other.
        positions: int64 [T], each token's position in its sequence.
        query_starts: int32 [S + 1], where each sequence's new tokens begin; the last entry is T.
        context_lens: int32 [S], tokens of each sequence with this step's included.
        block_tables: int32 [S, W], block ids from the first token on, rows padded with 0.
        logit_rows: int64 [R], indices into the T tokens whose logits are wanted, ascending.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    query_starts: IntArray
    context_lens: IntArray
    block_tables: IntArray
    logit_rows: npt.NDArray[np.int64]


class RunnerLostError(InternalError):
    """A process that runs part of the model is gone: no step can be run any more."""


class Runner(Protocol):
    """What the engine core needs of a model; ``ModelRunner`` is the real one.

    Attributes:
        layout: Of the blocks in this process's arena.
        geometry: KV of the whole model.
        shards: The instance's ranks, this process's first; each has an arena.
        on_layer: Called in the middle of a step with a layer's index as soon as all ranks that share this layer have
            written its KV; only layers of this process's pipeline stage are reported.
    """

    layout: KVLayout
    geometry: KVGeometry
    shards: tuple[ShardSpec, ...]
    fingerprint: Fingerprint
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    attention_backend: str

    @property
    def on_layer(self) -> Callable[[int], None] | None:
        """See the attributes."""

    @on_layer.setter
    def on_layer(self, function: Callable[[int], None] | None) -> None: ...

    def bind(self, shards: KVShards) -> None:
        """Use arenas, one per rank, as the KV pool."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step: write the new tokens' KV into the pool and return logits [R, vocab], float32 or model dtype.

        Raises:
            RunnerLostError: A process that runs part of the model is gone; any other error concerns this step alone.
        """

    def watch(self, on_lost: Callable[[RunnerLostError], None]) -> None:
        """Have a function called, in any thread, when a process that runs part of the model dies, or has died."""

    def close(self) -> None:
        """End the other processes that run the model; harmless if repeated."""
